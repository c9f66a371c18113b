#include "train/gzip.h"

#include <zlib.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan::train {

namespace {

class Deflate {
 public:
  explicit Deflate(const AppendBytes& append) : append_(append) {
    constexpr int kGzip = 16;  // a gzip header and checksum in place of zlib's
    const int result = ::deflateInit2(&stream_, Z_DEFAULT_COMPRESSION, Z_DEFLATED, MAX_WBITS + kGzip,
                                      /*memLevel=*/8, Z_DEFAULT_STRATEGY);
    TITAN_CHECK(result == Z_OK, "zlib: deflateInit2 gave ", result);
  }
  ~Deflate() { ::deflateEnd(&stream_); }
  Deflate(const Deflate&) = delete;
  Deflate& operator=(const Deflate&) = delete;

  void add(std::string_view text) {
    constexpr size_t kMost = std::numeric_limits<uInt>::max();
    for (; !text.empty(); text.remove_prefix(std::min(kMost, text.size())))
      run(text.substr(0, kMost), Z_NO_FLUSH);
  }
  void finish() { run({}, Z_FINISH); }

 private:
  void run(std::string_view text, int flush) {
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));  // zlib doesn't write there
    stream_.avail_in = static_cast<uInt>(text.size());
    do {
      stream_.next_out = reinterpret_cast<Bytef*>(buffer_.data());
      stream_.avail_out = static_cast<uInt>(buffer_.size());
      const int result = ::deflate(&stream_, flush);
      TITAN_INTERNAL_ASSERT(result != Z_STREAM_ERROR, "zlib: a stream in a wrong state");
      append_(std::span(buffer_).first(buffer_.size() - stream_.avail_out));
    } while (stream_.avail_out == 0);
  }

  const AppendBytes& append_;
  z_stream stream_{};
  std::vector<std::byte> buffer_ = std::vector<std::byte>(size_t{1} << 16);
};

}  // namespace

void write_gzip_atomic(const std::filesystem::path& path, std::span<const std::string_view> pieces) {
  write_file_atomic(path, [&](const AppendBytes& append) {
    Deflate deflate(append);
    for (const std::string_view piece : pieces) deflate.add(piece);
    deflate.finish();
  });
}

}  // namespace titan::train
