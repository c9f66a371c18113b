#include "observe/stream_rows.h"

#include <map>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "dist/trace_range.h"
#include "titan/dist/stream.h"

namespace titan::train {

namespace {

constexpr std::string_view kMark = "stream: ";
constexpr std::string_view kMarkedRange = R"("cat": "gpu_user_annotation", "name": "stream: )";
constexpr std::string_view kThread = R"("tid": )";
constexpr std::string_view kRow = R"("stream )";

void mark(const dist::NamedStream& named, c10::Device device) {
  const at::NoGradGuard no_grad;
  const dist::StreamGuard on_stream(named.stream);
  const dist::TraceRange range([&] { return std::string(kMark) + named.name; });
  at::zeros({1}, at::TensorOptions(device));
}

std::string_view digits_at(std::string_view text, size_t at) {
  const size_t end = std::min(text.find_first_not_of("0123456789", at), text.size());
  return text.substr(at, end - at);
}

// Their names by their numbers.
std::map<std::string_view, std::string_view> marked_streams(std::string_view trace) {
  std::map<std::string_view, std::string_view> names;
  for (size_t at = trace.find(kMarkedRange); at != trace.npos; at = trace.find(kMarkedRange, at + 1)) {
    const size_t name = at + kMarkedRange.size(), end = trace.find('"', name);
    const size_t thread = trace.find(kThread, end);
    if (end == trace.npos || thread == trace.npos) break;
    names[digits_at(trace, thread + kThread.size())] = trace.substr(name, end - name);
  }
  return names;
}

}  // namespace

void mark_streams(c10::Device device) {
  if (device.is_cpu()) return;
  mark({"compute", dist::Stream::current(device)}, device);
  for (const dist::NamedStream& named : dist::named_streams()) mark(named, device);
}

EditedText with_stream_names(std::string_view trace) {
  EditedText text;
  const auto names = marked_streams(trace);
  size_t done = 0;
  for (size_t at = trace.find(kRow); !names.empty() && at != trace.npos; at = trace.find(kRow, at + 1)) {
    const std::string_view number = digits_at(trace, at + kRow.size());
    const auto named = names.find(number);
    if (named == names.end()) continue;
    const size_t end = at + kRow.size() + number.size();
    text.pieces.push_back(trace.substr(done, end - done));
    text.inserted.push_back(" " + std::string(named->second));
    text.pieces.push_back(text.inserted.back());
    done = end;
  }
  text.pieces.push_back(trace.substr(done));
  return text;
}

}  // namespace titan::train
