#include "npy_header.h"

#include <charconv>

#include "titan/core/error.h"

namespace titan::data {
namespace {

constexpr std::string_view kNpyMagic = "\x93NUMPY";

// The header's dictionary: a Python literal with exactly three known keys, in any order.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& path) : rest_(text), path_(path) {}

  std::array<int64_t, 3> read_shape() {
    expect("{");
    while (!accept("}")) {
      member(quoted());
      accept(",");
    }
    if (!rest_.empty()) refuse("something follows the header's dictionary");
    if (seen_ != 7) refuse("the header lacks one of descr, fortran_order, shape");
    return shape_;
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw ConfigError(str(path_, ": not a readable .npy file: ", why));
  }

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
    if (end == rest_.npos) refuse("a string in the header doesn't end");
    std::string_view text = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    skip_space();
    return text;
  }

  void member(std::string_view key) {
    expect(":");
    if (key == "descr") {
      see(1);
      if (auto type = quoted(); type != "<i4") refuse(str("its type is ", type, ", expected <i4 (int32)"));
    } else if (key == "fortran_order") {
      see(2);
      if (!accept("False")) refuse("it is in Fortran order; save it in C order");
    } else if (key == "shape") {
      see(4);
      tuple();
    } else {
      refuse(str("the header has the unknown key '", key, "'"));
    }
  }

  void see(int key) {
    if (seen_ & key) refuse("the header has a key twice");
    seen_ |= key;
  }

  void tuple() {
    expect("(");
    size_t count = 0;
    while (!accept(")")) {
      int64_t size = number();
      if (count < 3) shape_[count] = size;
      ++count;
      if (!accept(",") && !rest_.starts_with(")")) refuse("the shape is not a tuple");
    }
    if (count != 3) refuse(str("it has ", count, " dimensions, expected 3: [steps, global batch, sequence]"));
  }

  int64_t number() {
    int64_t value = -1;
    auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error != std::errc() || value < 0) refuse("the shape has something else than sizes");
    rest_.remove_prefix(end - rest_.data());
    skip_space();
    return value;
  }

  std::string_view rest_;
  const std::string& path_;
  int seen_ = 0;
  std::array<int64_t, 3> shape_{};
};

uint64_t little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

void check_size(const std::array<int64_t, 3>& shape, size_t payload, const std::string& path) {
  int64_t bytes = sizeof(int32_t);
  bool overflow = false;
  for (int64_t size : shape) overflow = overflow || __builtin_mul_overflow(bytes, size, &bytes);
  if (!overflow && static_cast<size_t>(bytes) == payload) return;
  throw ConfigError(str(path, ": shape [", shape[0], ", ", shape[1], ", ", shape[2],
                        "] of int32 does not fit the ", payload,
                        " bytes that follow the header: the file is cut short or damaged"));
}

}  // namespace

NpyHeader parse_npy_header(std::string_view file, const std::string& path) {
  auto refuse = [&](const char* why) { throw ConfigError(str(path, ": not a readable .npy file: ", why)); };
  if (file.size() < 10 || !file.starts_with(kNpyMagic)) refuse("it doesn't begin as one");
  int major = file[6];
  if (major < 1 || major > 3 || file[7] != 0) refuse("its version is none of 1.0, 2.0, 3.0");
  size_t length_bytes = major == 1 ? 2 : 4;
  size_t begin = 8 + length_bytes;
  if (file.size() < begin) refuse("it ends within the header");
  uint64_t length = little_endian(file.substr(8, length_bytes));
  if (length > file.size() - begin) refuse("it ends within the header");
  NpyHeader header{.data_start = begin + length};
  header.shape = HeaderReader(file.substr(begin, length), path).read_shape();
  check_size(header.shape, file.size() - header.data_start, path);
  return header;
}

}  // namespace titan::data
