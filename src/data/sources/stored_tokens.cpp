#include "data/sources/stored_tokens.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/hash.h"
#include "data/sources/contents.h"
#include "data/sources/npy.h"
#include "titan/core/error.h"

namespace titan::data {
namespace {

// llm.c's header (dev/data/data_common.py): 256 int32, of which these are the first.
constexpr int64_t kLlmcHeaderBytes = 1024;
struct LlmcHeader {
  int32_t magic, version, num_ids;
};
struct LlmcForm {
  int32_t magic, version;
  int64_t width;
};
constexpr std::array kLlmcForms = {LlmcForm{20240520, 1, 2}, LlmcForm{20240801, 7, 4}};

constexpr int64_t kSampledIds = 1024;
constexpr size_t kCheckedFiles = 256;

const LlmcForm* llmc_form(std::string_view begin, LlmcHeader& header) {
  if (begin.size() < sizeof header) return nullptr;
  std::memcpy(&header, begin.data(), sizeof header);
  const auto form = std::ranges::find(kLlmcForms, header.magic, &LlmcForm::magic);
  return form == kLlmcForms.end() ? nullptr : &*form;
}

/// Appends ids without looking at them: they may be cut between any two.
class StoredIdsEncoder : public TextEncoder {
 public:
  StoredIdsEncoder(const StoredIds& tokenizer, std::string_view text) : tokenizer_(tokenizer), rest_(text) {}

  bool encode_block(size_t bytes, std::vector<int32_t>& ids) override {
    const size_t count = std::min(rest_.size(), bytes + kStoredIdBytes - 1) / kStoredIdBytes * kStoredIdBytes;
    tokenizer_.encode_into(rest_.substr(0, count), ids);
    rest_.remove_prefix(count);
    return rest_.empty();
  }

 private:
  const StoredIds& tokenizer_;
  std::string_view rest_;
};

int64_t width_of(const std::string& type) { return type == "uint16" ? 2 : 4; }

uint32_t id_at(std::string_view bytes, size_t i, int64_t width) {
  uint32_t id = 0;
  std::memcpy(&id, bytes.data() + i * static_cast<size_t>(width), static_cast<size_t>(width));
  return id;
}

// Ids of a small vocabulary that are stored in 32 bits, read as 16: every second one is 0.
bool looks_twice_as_wide(std::string_view ids) {
  constexpr size_t kFewest = 32;
  const size_t pairs = ids.size() / 4;
  bool has_low = false;
  for (size_t i = 0; i < pairs; ++i) {
    if (id_at(ids, 2 * i + 1, 2) != 0) return false;
    has_low = has_low || id_at(ids, 2 * i, 2) != 0;
  }
  return pairs >= kFewest && has_low;
}

}  // namespace

StoredTokens::Row StoredTokens::row_of(const FileEntry& file, const std::string& raw_type) {
  const std::string path = file.path.string();
  if (file.size == 0) throw ConfigError(str(path, " is empty: it holds no token ids"));
  std::string begin;
  read_range(file, 0, std::min(file.size, kMostNpyHeaderBytes), begin);
  if (begin.starts_with(kNpyMagic) || file.name.ends_with(".npy")) {
    const NpyRow row = parse_npy_row(begin, file.size, path);
    if (row.size == 0) throw ConfigError(str(path, " holds no token ids: its shape is [0]"));
    return {file, row.data_start, row.width, row.size, true};
  }
  LlmcHeader header{};
  if (const LlmcForm* form = llmc_form(begin, header)) {
    if (header.version != form->version)
      throw ConfigError(str(path, ": llm.c's header (magic number ", header.magic, ") has version ",
                            header.version, ", expected ", form->version));
    const int64_t num_ids = (file.size - kLlmcHeaderBytes) / form->width;
    if (file.size != kLlmcHeaderBytes + header.num_ids * form->width || num_ids < 1)
      throw ConfigError(str(path, ": llm.c's header announces ", header.num_ids, " token ids of ",
                            form->width, " bytes, but ", std::max(int64_t{0}, file.size - kLlmcHeaderBytes),
                            " bytes follow it: the file is cut short or damaged"));
    return {file, kLlmcHeaderBytes, form->width, num_ids, true};
  }
  const int64_t width = width_of(raw_type);
  if (file.size % width != 0)
    throw ConfigError(str(path, " has ", file.size, " bytes, not a whole number of ", raw_type,
                          " ids: it is cut short, or isn't a row of token ids (data.token_type)"));
  if (width == 2 && looks_twice_as_wide(begin.substr(0, begin.size() / 4 * 4)))
    throw ConfigError(str(path,
                          ": every second uint16 at its beginning is 0, so its ids are wider: set "
                          "data.token_type = \"uint32\""));
  return {file, 0, width, file.size / width, false};
}

StoredTokens::StoredTokens(const SourceRequest& request, int64_t vocab_size) : vocab_size_(vocab_size) {
  const DataSettings& settings = request.settings;
  const std::vector<FileEntry> files = list_files(
      request.path, settings.extensions.empty() ? config::StringList{".bin", ".npy"} : settings.extensions);
  if (settings.check_contents) check_contents("tokens", files);
  std::vector<std::string> problems;
  int64_t num_ids = 0;
  for (const FileEntry& file : files) {
    try {
      rows_.push_back(row_of(file, settings.token_type));
      num_ids += rows_.back().num_ids;
    } catch (const ConfigError& error) {
      problems.push_back(error.what());
    }
  }
  if (!problems.empty()) throw ConfigError(std::move(problems));
  for (size_t i = 0; i < rows_.size(); i += rows_.size() / kCheckedFiles + 1)
    check_samples(rows_[i], static_cast<int64_t>(i));
  fingerprint_ = str("tokens:", files.size(), " files:", num_ids, " ids:", hex(fingerprint_files(files)));
}

void StoredTokens::check_samples(const Row& row, int64_t i) const {
  const int64_t count = std::min(kSampledIds, row.num_ids);
  std::string ids;
  for (int64_t begin : {int64_t{0}, (row.num_ids - count) / 2, row.num_ids - count})
    read(i, begin * kStoredIdBytes, count * kStoredIdBytes, ids);
}

void StoredTokens::read(int64_t i, int64_t begin, int64_t count, std::string& text) const {
  TITAN_INTERNAL_ASSERT(begin % kStoredIdBytes == 0 && count % kStoredIdBytes == 0, begin, ", ", count);
  const Row& row = rows_[static_cast<size_t>(i)];
  const int64_t first = begin / kStoredIdBytes, num_ids = count / kStoredIdBytes;
  std::string stored;
  read_range(row.file, row.data_start + first * row.width, num_ids * row.width, stored);
  text.resize(static_cast<size_t>(count));
  for (size_t k = 0; k < static_cast<size_t>(num_ids); ++k) {
    const uint32_t id = id_at(stored, k, row.width);
    if (id >= static_cast<uint64_t>(vocab_size_))
      throw ConfigError(str(row.file.path.string(), ": token ", first + static_cast<int64_t>(k), " of ",
                            row.num_ids, " (from 0) is ", id, ", outside of the model's vocabulary of ",
                            vocab_size_,
                            row.has_header ? "" : ", if the ids are as wide as data.token_type says"));
    std::memcpy(text.data() + k * kStoredIdBytes, &id, kStoredIdBytes);
  }
}

void StoredIds::encode_into(std::string_view text, std::vector<int32_t>& ids) const {
  const size_t before = ids.size();
  ids.resize(before + text.size() / kStoredIdBytes);
  std::memcpy(ids.data() + before, text.data(), (ids.size() - before) * kStoredIdBytes);
}

std::unique_ptr<TextEncoder> StoredIds::open(std::string_view text) const {
  return std::make_unique<StoredIdsEncoder>(*this, text);
}

std::string StoredIds::decode(std::span<const int32_t>) const {
  throw Error("stored token ids can't be turned into text: their tokenizer isn't known");
}

}  // namespace titan::data
