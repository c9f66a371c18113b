#pragma once

// Names for the rows of a GPU's streams in a trace. Kineto numbers streams as the driver does, and the driver
// doesn't tell: so at the start of a trace each named stream gets a tiny kernel under a range of its name,
// and where the trace has that range is the stream's number.

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/Device.h>

namespace titan::train {

/// Queues the kernels, on `device`'s current stream ("compute") and all of dist::named_streams(). Nothing on
/// a CPU.
void mark_streams(c10::Device device);

/// A text in pieces, some of another text.
struct EditedText {
  std::vector<std::string_view> pieces;
  std::deque<std::string> inserted;  ///< what the other pieces point to
};

/// `trace`, Kineto's JSON, with names behind the streams' numbers: "stream 20" is "stream 20 fsdp gather". As
/// it is where no stream was marked.
EditedText with_stream_names(std::string_view trace);

}  // namespace titan::train
