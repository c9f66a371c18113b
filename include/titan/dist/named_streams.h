#pragma once

// What the streams of this process are for, so that a trace can say so.

#include <string>
#include <vector>

#include "titan/dist/stream.h"

namespace titan::dist {

struct NamedStream {
  std::string name;
  Stream stream;
};

/// Notes a stream under its purpose, "fsdp gather"; the newest of a name counts. On a CPU there is none, and
/// nothing is noted. Thread-safe.
void name_stream(std::string name, const Stream& stream);

std::vector<NamedStream> named_streams();

}  // namespace titan::dist
