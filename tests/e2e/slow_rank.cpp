// A data source that is slow on rank 1: short documents, each of which takes a while to load.

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "titan/data/source.h"

namespace {

constexpr int64_t kBytes = 32;

class SlowSource : public titan::data::Source {
 public:
  explicit SlowSource(bool slow) : slow_(slow) {}
  int64_t size() const override { return 5000; }
  int64_t length(int64_t /*i*/) const override { return kBytes; }
  void read(int64_t i, int64_t begin, int64_t count, std::string& text) const override {
    if (slow_) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    std::string whole = "document number " + std::to_string(i);
    whole.resize(kBytes, '.');
    text = whole.substr(static_cast<size_t>(begin), static_cast<size_t>(count));
  }
  std::string fingerprint() const override { return "slow"; }

 private:
  bool slow_;
};

}  // namespace

extern "C" void titan_register() {
  titan::data::source_kinds().add("slow", [](const titan::data::SourceRequest&) {
    const char* rank = std::getenv("RANK");
    return std::make_shared<SlowSource>(rank && std::string_view(rank) == "1");
  });
}
