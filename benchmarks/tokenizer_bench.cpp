// Speed of a tokenizer on one thread. Also writes its ids, to compare them with another implementation's.
//
//   tokenizer_bench TOKENIZER DOCUMENTS [--runs N] [--ids FILE] [--texts FILE]
//
// TOKENIZER is a folder with tokenizer.json, or "bytes". DOCUMENTS and FILEs are lists of records: a
// little-endian uint32 count and that many items (bytes of a document, int32 ids, bytes of the decoded
// document). Prints one JSON object: the median MB/s (10^6 bytes of text) of encoding and of decoding over N
// runs.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "core/file.h"
#include "titan/core/error.h"
#include "titan/data/tokenizer.h"

namespace {

using Ids = std::vector<int32_t>;

std::vector<std::string_view> read_documents(std::string_view file) {
  std::vector<std::string_view> documents;
  while (!file.empty()) {
    uint32_t size = 0;
    TITAN_CHECK(file.size() >= sizeof size, "the documents file ends in the middle of a record");
    std::memcpy(&size, file.data(), sizeof size);
    TITAN_CHECK(file.size() - sizeof size >= size, "the documents file ends in the middle of a record");
    documents.push_back(file.substr(sizeof size, size));
    file.remove_prefix(sizeof size + size);
  }
  return documents;
}

template <class Records>
void write_records(const std::string& path, const Records& records) {
  std::ofstream out(path, std::ios::binary);
  for (const auto& record : records) {
    auto count = static_cast<uint32_t>(record.size());
    out.write(reinterpret_cast<const char*>(&count), sizeof count);
    out.write(reinterpret_cast<const char*>(record.data()),
              static_cast<std::streamsize>(count * sizeof record[0]));
  }
  TITAN_CHECK(out.flush(), "could not write ", path);
}

template <class Body>
double median_seconds(int runs, Body&& body) {
  std::vector<double> seconds;
  for (int i = 0; i < runs; ++i) {
    auto start = std::chrono::steady_clock::now();
    body();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + runs / 2, seconds.end());
  return seconds[runs / 2];
}

int run(const std::vector<std::string>& args) {
  TITAN_CHECK(args.size() >= 2 && args.size() % 2 == 0,
              "usage: tokenizer_bench TOKENIZER DOCUMENTS [--runs N] [--ids FILE] [--texts FILE]");
  int runs = 1;
  std::string ids_path, texts_path;
  for (size_t i = 2; i < args.size(); i += 2) {
    if (args[i] == "--runs")
      runs = std::stoi(args[i + 1]);
    else if (args[i] == "--ids")
      ids_path = args[i + 1];
    else if (args[i] == "--texts")
      texts_path = args[i + 1];
    else
      TITAN_CHECK(false, "unknown option ", args[i]);
  }
  auto tokenizer = titan::data::build_tokenizer(args[0]);
  titan::MappedFile file(args[1]);
  auto documents = read_documents(file.text());
  std::vector<Ids> ids(documents.size());
  std::vector<std::string> texts(documents.size());
  double encoding = median_seconds(runs, [&] {
    for (size_t i = 0; i < documents.size(); ++i) {
      ids[i].clear();
      tokenizer->encode_into(documents[i], ids[i]);
    }
  });
  double decoding = median_seconds(runs, [&] {
    for (size_t i = 0; i < documents.size(); ++i) texts[i] = tokenizer->decode(ids[i]);
  });
  size_t bytes = 0, decoded = 0, tokens = 0;
  for (size_t i = 0; i < documents.size(); ++i) {
    bytes += documents[i].size();
    decoded += texts[i].size();
    tokens += ids[i].size();
  }
  if (!ids_path.empty()) write_records(ids_path, ids);
  if (!texts_path.empty()) write_records(texts_path, texts);
  std::cout << "{\"bytes\": " << bytes << ", \"tokens\": " << tokens
            << ", \"encode_mb_per_s\": " << bytes / encoding / 1e6
            << ", \"decode_mb_per_s\": " << decoded / decoding / 1e6 << "}" << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "tokenizer_bench: " << error.what() << std::endl;
    return 1;
  }
}
