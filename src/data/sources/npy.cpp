#include "data/sources/npy.h"

#include <charconv>
#include <set>
#include <utility>
#include <vector>

#include "titan/core/error.h"

namespace titan::data {
namespace {

[[noreturn]] void refuse_npy(const std::string& path, const std::string& why) {
  throw ConfigError(str(path, ": not a readable .npy file: ", why));
}

constexpr size_t kMostDimensions = 32;  // NumPy's own limit, before version 2

struct Array {
  std::string type;  // as NumPy writes it: "<i4"
  std::vector<int64_t> shape;
  size_t data_start = 0;
};

// The header: a Python dictionary with exactly three known keys, in any order.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& path) : rest_(text), path_(path) {}

  Array read() {
    expect("{");
    while (!accept("}")) {
      member(quoted());
      accept(",");
    }
    if (!rest_.empty()) refuse("the header has text after its dictionary");
    if (seen_.size() != 3) refuse("the header lacks one of descr, fortran_order, shape");
    return std::move(array_);
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const { refuse_npy(path_, why); }

  void skip_space() {
    while (!rest_.empty() && (rest_[0] == ' ' || rest_[0] == '\n')) rest_.remove_prefix(1);
  }
  bool accept(std::string_view token) {
    skip_space();
    if (!rest_.starts_with(token)) return false;
    rest_.remove_prefix(token.size());
    skip_space();
    return true;
  }
  void expect(std::string_view token) {
    if (!accept(token)) refuse(str("expected '", token, "' in the header"));
  }

  std::string_view quoted() {
    std::string_view quote = accept("'") ? "'" : "\"";
    if (quote == "\"") expect(quote);
    size_t end = rest_.find(quote);
    if (end == rest_.npos) refuse("a string in the header has no end");
    std::string_view text = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    skip_space();
    return text;
  }

  void member(std::string_view key) {
    expect(":");
    if (!seen_.insert(key).second) refuse("the header has a duplicate key");
    if (key == "descr") {
      array_.type = quoted();
    } else if (key == "fortran_order") {
      if (!accept("False")) refuse("it is in Fortran order; save it in C order");
    } else if (key == "shape") {
      tuple();
    } else {
      refuse(str("the header has the unknown key '", key, "'"));
    }
  }

  void tuple() {
    expect("(");
    while (!accept(")")) {
      array_.shape.push_back(number());
      if (array_.shape.size() > kMostDimensions) refuse("it has too many dimensions");
      if (!accept(",") && !rest_.starts_with(")")) refuse("the shape is not a tuple");
    }
  }

  int64_t number() {
    int64_t value = -1;
    auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error != std::errc() || value < 0) refuse("the shape has an entry that is not a size");
    rest_.remove_prefix(end - rest_.data());
    skip_space();
    return value;
  }

  std::string_view rest_;
  const std::string& path_;
  std::set<std::string_view> seen_;
  Array array_;
};

uint64_t little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

// `begin` is the whole file or its beginning.
Array read_header(std::string_view begin, const std::string& path) {
  if (begin.size() < 10 || !begin.starts_with(kNpyMagic))
    refuse_npy(path, "it doesn't begin with its magic bytes");
  const int major = begin[6];
  if (major < 1 || major > 3 || begin[7] != 0) refuse_npy(path, "its version is not 1.0, 2.0 or 3.0");
  const size_t length_bytes = major == 1 ? 2 : 4, start = 8 + length_bytes;
  if (begin.size() < start) refuse_npy(path, "it ends within the header");
  const uint64_t length = little_endian(begin.substr(8, length_bytes));
  if (length > begin.size() - start) refuse_npy(path, "it ends within the header");
  Array array = HeaderReader(begin.substr(start, length), path).read();
  array.data_start = start + length;
  return array;
}

void check_size(const Array& array, int64_t width, size_t payload, const std::string& path) {
  int64_t bytes = width;
  bool overflow = false;
  for (int64_t size : array.shape) overflow = overflow || __builtin_mul_overflow(bytes, size, &bytes);
  if (!overflow && static_cast<size_t>(bytes) == payload) return;
  throw ConfigError(str(path, ": shape ", "[", list_str(array.shape), "] of ", array.type,
                        " does not fit the ", payload,
                        " bytes that follow the header: the file is cut short or damaged"));
}

}  // namespace

NpyHeader parse_npy_header(std::string_view file, const std::string& path) {
  const Array array = read_header(file, path);
  if (array.type != "<i4") refuse_npy(path, str("its type is ", array.type, ", expected <i4 (int32)"));
  if (array.shape.size() != 3)
    refuse_npy(
        path, str("it has ", array.shape.size(), " dimensions, expected 3: [steps, global batch, sequence]"));
  check_size(array, sizeof(int32_t), file.size() - array.data_start, path);
  return {.shape = {array.shape[0], array.shape[1], array.shape[2]}, .data_start = array.data_start};
}

NpyRow parse_npy_row(std::string_view begin, int64_t file_bytes, const std::string& path) {
  const Array array = read_header(begin, path);
  const bool is_short = array.type == "<u2";
  if (!is_short && array.type != "<u4" && array.type != "<i4")
    refuse_npy(path, str("its type is ", array.type, ", expected <u2, <u4 or <i4 (uint16, uint32 or int32)"));
  if (array.shape.size() != 1)
    refuse_npy(path, str("it has ", array.shape.size(), " dimensions, expected 1: a row of token ids"));
  const int64_t width = is_short ? 2 : 4;
  check_size(array, width, static_cast<size_t>(file_bytes) - array.data_start, path);
  return {.size = array.shape[0], .width = width, .data_start = static_cast<int64_t>(array.data_start)};
}

}  // namespace titan::data
