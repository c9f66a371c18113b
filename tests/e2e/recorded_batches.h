#pragma once

// Runs of the small model on batches that a test writes down, to choose what each step sees.

#include "e2e/resume_run.h"

namespace titan::testing {

inline constexpr int kRecordedRows = 4, kRecordedLength = 48;

/// A row of each list is a batch of kRecordedRows x kRecordedLength tokens.
struct Recording {
  std::vector<std::vector<int32_t>> inputs, labels;
};

inline void write_npy(const fs::path& path, const std::vector<std::vector<int32_t>>& steps) {
  std::string header = "{'descr': '<i4', 'fortran_order': False, 'shape': (" + std::to_string(steps.size()) +
                       ", " + std::to_string(kRecordedRows) + ", " + std::to_string(kRecordedLength) + "), }";
  header.resize(128 - 10 - 1, ' ');
  header += '\n';
  std::ofstream file(path, std::ios::binary);
  const auto length = static_cast<uint16_t>(header.size());
  file << "\x93NUMPY" << '\x01' << '\x00' << static_cast<char>(length & 0xff)
       << static_cast<char>(length >> 8) << header;
  for (const auto& step : steps)
    file.write(reinterpret_cast<const char*>(step.data()),
               static_cast<std::streamsize>(step.size() * sizeof(int32_t)));
}

/// In a new folder of that name.
inline fs::path write(const Recording& recording, const std::string& name) {
  const fs::path folder = fresh_folder(name);
  write_npy(folder / "input.npy", recording.inputs);
  write_npy(folder / "labels.npy", recording.labels);
  return folder;
}

/// For resumable().
inline Words of_recording(const fs::path& folder, int steps) {
  return {"--training.dataset", "tokens",           "--training.dataset_path",
          folder.string(),      "--training.steps", std::to_string(steps)};
}

}  // namespace titan::testing
