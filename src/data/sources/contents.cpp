#include "data/sources/contents.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/json.h"
#include "data/sources/npy.h"
#include "titan/core/error.h"

namespace titan::data {
namespace {

using namespace std::string_view_literals;

struct Form {
  std::string_view magic;  // the file's first bytes
  std::string_view name;
};
constexpr std::array kForms = {
    Form{"PAR1"sv, "a Parquet file"},
    Form{"ARROW1\0\0"sv, "an Arrow file"},
    Form{"\xff\xff\xff\xff"sv, "an Arrow stream"},
    Form{"FEA1"sv, "a Feather file"},
    Form{"\x1f\x8b\x08"sv, "gzip-compressed"},
    Form{"\x28\xb5\x2f\xfd"sv, "zstd-compressed"},
    Form{"\xfd\x37zXZ\0"sv, "xz-compressed"},
    Form{"BZh"sv, "bzip2-compressed"},
    Form{"\x04\x22\x4d\x18"sv, "lz4-compressed"},
    Form{"PK\x03\x04"sv, "a zip archive, as .zip, .npz and PyTorch's .pt are"},
    Form{"7z\xbc\xaf\x27\x1c"sv, "a 7z archive"},
    Form{kNpyMagic, "a NumPy array"},
    Form{"\x89HDF\r\n\x1a\n"sv, "an HDF5 file"},
    Form{"SQLite format 3\0"sv, "an SQLite database"},
    Form{"%PDF-"sv, "a PDF file"},
    Form{"\x7f"
         "ELF"sv,
         "a program or library"},
    Form{"\x80\x02"sv, "a Python pickle"},
    Form{"\x80\x03"sv, "a Python pickle"},
    Form{"\x80\x04"sv, "a Python pickle"},
    Form{"\x80\x05"sv, "a Python pickle"},
    Form{"MMIDIDX\0\0"sv, "an index of Megatron's"},
    Form{"\xff\xfe"sv, "UTF-16 text"},
    Form{"\xfe\xff"sv, "UTF-16 text"},
    Form{"version https://git-lfs.github.com/spec/"sv,
         "a Git LFS pointer, not the file itself (`git lfs pull` brings that)"},
};

// By the name alone: a file may be empty or cut short.
constexpr std::array kEndings = {
    Form{".parquet", "a Parquet file"}, Form{".arrow", "an Arrow file"},
    Form{".feather", "a Feather file"}, Form{".gz", "gzip-compressed"},
    Form{".zst", "zstd-compressed"},    Form{".xz", "xz-compressed"},
    Form{".bz2", "bzip2-compressed"},   Form{".zip", "a zip archive"},
    Form{".tar", "a tar archive"},      Form{".npy", "a NumPy array"},
    Form{".npz", "a NumPy archive"},    Form{".safetensors", "a safetensors file"},
    Form{".pt", "a PyTorch file"},
};

constexpr int64_t kLookedAt = 16 << 10;  // bytes of a file
constexpr size_t kMostFiles = 512;
constexpr size_t kMostNamed = 5;

bool is_safetensors(std::string_view begin) {
  uint64_t header_bytes = 0;
  if (begin.size() < sizeof header_bytes + 2) return false;
  std::memcpy(&header_bytes, begin.data(), sizeof header_bytes);
  return header_bytes < uint64_t{100} << 20 && begin.substr(sizeof header_bytes, 2) == "{\"";
}

// Text has next to no control characters but these.
bool is_binary(std::string_view begin) {
  constexpr std::string_view kOfText = "\t\n\v\f\r\b\x1b";
  constexpr double kMostShare = 0.02;
  const auto controls = std::ranges::count_if(
      begin, [&](char c) { return static_cast<unsigned char>(c) < ' ' && kOfText.find(c) == kOfText.npos; });
  return static_cast<double>(controls) > kMostShare * static_cast<double>(begin.size());
}

bool is_object(std::string_view line) {
  std::string problem;
  return line.starts_with('{') && parse_json(line, &problem).is_object() && problem.empty();
}

// Two lines with an object each, the second of which may be longer than `begin`; or one if the name says so.
bool is_json_lines(const FileEntry& file, std::string_view begin) {
  constexpr std::string_view kObject = "{\"";
  const bool is_cut = std::ssize(begin) < file.size;
  const bool is_named = file.name.ends_with(".jsonl") || file.name.ends_with(".ndjson");
  const size_t end = begin.find('\n');
  if (end == begin.npos)
    return (is_named || (is_cut && file.name.ends_with(".json"))) && begin.starts_with(kObject);
  if (!is_object(begin.substr(0, end))) return false;
  const size_t second_end = begin.find('\n', end + 1);
  const std::string_view second = begin.substr(end + 1, second_end - end - 1);
  const bool second_is_cut = is_cut && second_end == begin.npos;
  return is_named || is_object(second) || (second_is_cut && second.starts_with(kObject));
}

const char* what_it_reads(const std::string& kind) {
  if (kind == "jsonl") return "JSON Lines, not compressed";
  if (kind == "tokens") return "rows of token ids, .npy or .bin";
  return "text in UTF-8, not compressed";
}

std::string_view form_of(std::string_view begin, size_t shortest_magic) {
  for (const Form& form : kForms)
    if (form.magic.size() >= shortest_magic && begin.starts_with(form.magic)) return form.name;
  if (is_safetensors(begin)) return "a safetensors file";
  constexpr size_t kTarMagic = 257;
  if (begin.size() > kTarMagic && begin.substr(kTarMagic).starts_with("ustar")) return "a tar archive";
  return "";
}

std::string_view form_named(const std::string& name) {
  for (const Form& ending : kEndings)
    if (name.ends_with(ending.magic)) return ending.name;
  return "";
}

// The name of a form that the data set doesn't read, if the file plainly has it; or else "".
std::string problem_with(const std::string& kind, const FileEntry& file, std::string_view begin) {
  const bool is_tokens = kind == "tokens";
  if (is_tokens && (file.name.ends_with(".npy") || begin.starts_with(kNpyMagic))) return "";
  // The first ids may be the same bytes as a short magic number.
  constexpr size_t kLongMagic = 4;
  if (auto form = form_of(begin, is_tokens ? kLongMagic : 0); !form.empty()) return std::string(form);
  if (auto form = form_named(file.name); !form.empty())
    return str(form, " by its name", file.size == 0 ? ", and empty" : "");
  if (is_tokens) return "";
  // The line of a NUL byte in JSON Lines is reported by their reader.
  if (is_binary(begin) && !(kind == "jsonl" && begin.starts_with('{'))) return "binary, not text";
  if (kind == "text" && is_json_lines(file, begin))
    return "JSON Lines, of which only one member is text (training.dataset = \"jsonl\" reads it)";
  return "";
}

}  // namespace

void check_contents(const std::string& kind, const std::vector<FileEntry>& files) {
  std::vector<std::string> problems;
  const size_t stride = files.size() / kMostFiles + 1;
  size_t num_problems = 0;
  std::string begin;
  for (size_t i = 0; i < files.size(); ++i) {
    begin.clear();
    if (i % stride == 0) read_range(files[i], 0, std::min(kLookedAt, files[i].size), begin);
    const std::string problem = problem_with(kind, files[i], begin);
    if (problem.empty() || ++num_problems > kMostNamed) continue;
    problems.push_back(str(files[i].path.string(), " is ", problem));
  }
  if (num_problems == 0) return;
  if (num_problems > kMostNamed) problems.push_back(str("and ", num_problems - kMostNamed, " more files"));
  problems.back() += str(". The data set '", kind, "' reads ", what_it_reads(kind),
                         "; data.extensions selects files in a folder, and data.check_contents = false reads "
                         "whatever they hold");
  throw ConfigError(std::move(problems));
}

}  // namespace titan::data
