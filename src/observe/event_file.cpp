#include "observe/event_file.h"

#include <unistd.h>

#include <chrono>
#include <cstring>

#include "core/durable.h"
#include "core/hash.h"
#include "titan/core/error.h"

namespace titan::train {

namespace {

// Protobuf's wire format, as far as an Event with scalars needs it:
// https://protobuf.dev/programming-guides/encoding/
enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void put_tag(std::string& out, uint32_t field, WireType type) { put_varint(out, field << 3 | type); }

// Both formats are little-endian, as every machine that LibTorch runs on.
template <class T>
void put_raw(std::string& out, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

void put_bytes(std::string& out, uint32_t field, const std::string& bytes) {
  put_tag(out, field, kBytes);
  put_varint(out, bytes.size());
  out += bytes;
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }
std::string event_head() {
  std::string event;
  put_tag(event, 1, kFixed64);
  put_raw(event, now_s());
  return event;
}

// Summary.Value { string tag = 1; float simple_value = 2; }
std::string summary_value(const std::string& tag, double value) {
  std::string message;
  put_bytes(message, 1, tag);
  put_tag(message, 2, kFixed32);
  put_raw(message, static_cast<float>(value));
  return message;
}

// TFRecord's masking, so that a checksum of data that itself holds checksums stays strong.
uint32_t masked_crc(std::string_view bytes) {
  uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

std::filesystem::path new_event_file(const std::filesystem::path& folder) {
  char host[256] = "localhost";
  ::gethostname(host, sizeof host - 1);
  // The name that TensorBoard looks for: "tfevents", a time, a host; the process id keeps two runs of a
  // second apart.
  return folder / str("events.out.tfevents.", static_cast<int64_t>(now_s()), ".", host, ".", ::getpid());
}

}  // namespace

EventFileWriter::EventFileWriter(const std::filesystem::path& folder)
    : file_(std::make_unique<AppendFile>(new_event_file(folder), /*truncate=*/false)) {
  std::string version = event_head();
  put_bytes(version, 3, "brain.Event:2");
  append_record(version);
}

EventFileWriter::~EventFileWriter() = default;

void EventFileWriter::write(int64_t step, const std::vector<std::pair<std::string, double>>& scalars) {
  std::string event = event_head();
  put_tag(event, 2, kVarint);
  put_varint(event, static_cast<uint64_t>(step));
  std::string summary;
  for (const auto& [tag, value] : scalars) put_bytes(summary, 1, summary_value(tag, value));
  put_bytes(event, 5, summary);
  append_record(event);
}

const std::filesystem::path& EventFileWriter::path() const { return file_->path(); }

void EventFileWriter::sync() { file_->sync(); }

void EventFileWriter::append_record(const std::string& event) {
  std::string length;
  put_raw(length, static_cast<uint64_t>(event.size()));
  std::string record = length;
  put_raw(record, masked_crc(length));
  record += event;
  put_raw(record, masked_crc(event));
  file_->append(record);
}

}  // namespace titan::train
