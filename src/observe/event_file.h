#pragma once

// TensorBoard's event files: TFRecords (length and data, each with a masked CRC-32C) of `tensorflow.Event`
// messages. https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/util/event.proto

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace titan {
class AppendFile;
}

namespace titan::train {

/// Appends scalars to one event file in `folder`. Throws Error that names the file when it can't be written.
class EventFileWriter {
 public:
  explicit EventFileWriter(const std::filesystem::path& folder);
  ~EventFileWriter();
  EventFileWriter(const EventFileWriter&) = delete;
  EventFileWriter& operator=(const EventFileWriter&) = delete;

  /// One event with all `scalars` (tag, value) of a step. TensorBoard keeps values as float32.
  void write(int64_t step, const std::vector<std::pair<std::string, double>>& scalars);
  void sync();
  const std::filesystem::path& path() const;

 private:
  void append_record(const std::string& event);

  std::unique_ptr<AppendFile> file_;
};

}  // namespace titan::train
