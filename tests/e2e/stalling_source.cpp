// Documents of which one rank reads a few and then waits forever: a file system that hangs. Load it with
// `--experimental.custom_import`; the source's path is "RANK READS FILE": the rank, the number it reads
// first, and a file that it creates when it stalls.

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "titan/data/source.h"

namespace {

class StallingSource : public titan::data::Source {
 public:
  explicit StallingSource(const std::string& path) {
    int rank = -1;
    std::istringstream(path) >> rank >> num_reads_ >> file_;
    const char* mine = std::getenv("RANK");
    stalls_ = mine && std::atoi(mine) == rank;
  }
  int64_t size() const override { return 1000; }
  int64_t length(int64_t) const override { return 64; }
  void read(int64_t i, int64_t begin, int64_t count, std::string& text) const override {
    if (stalls_ && ++reads_ > num_reads_) stall();
    const std::string document = "document " + std::to_string(i) + std::string(64, '.');
    text = document.substr(static_cast<size_t>(begin), static_cast<size_t>(count));
  }
  std::string fingerprint() const override { return "stalling"; }

 private:
  [[noreturn]] void stall() const {
    std::ofstream(file_) << "stalled";
    while (true) ::pause();
  }

  int num_reads_ = 0;
  std::string file_;
  bool stalls_ = false;
  mutable std::atomic<int> reads_{0};
};

}  // namespace

extern "C" void titan_register() {
  titan::data::source_kinds().add("stalling", [](const titan::data::SourceRequest& request) {
    return std::make_shared<StallingSource>(request.path);
  });
}
