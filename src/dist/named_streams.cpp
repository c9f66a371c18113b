#include "titan/dist/named_streams.h"

#include <algorithm>
#include <mutex>

namespace titan::dist {
namespace {

struct StreamNames {
  std::mutex mutex;
  std::vector<NamedStream> list;
};

// Streams come from LibTorch's pools, which are the process's.
StreamNames& stream_names() {
  static StreamNames names;
  return names;
}

}  // namespace

void name_stream(std::string name, const Stream& stream) {
  if (!stream.on_device()) return;
  StreamNames& names = stream_names();
  const std::lock_guard lock(names.mutex);
  const auto known = std::find_if(names.list.begin(), names.list.end(),
                                  [&](const NamedStream& each) { return each.name == name; });
  if (known == names.list.end()) {
    names.list.push_back({std::move(name), stream});
  } else {
    known->stream = stream;
  }
}

std::vector<NamedStream> named_streams() {
  StreamNames& names = stream_names();
  const std::lock_guard lock(names.mutex);
  return names.list;
}

}  // namespace titan::dist
