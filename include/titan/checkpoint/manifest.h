#pragma once

// manifest.json: what makes a folder of files a checkpoint. Its first bytes are a digest of the rest, so that
// no damaged one is believed; docs/checkpoint.md describes every key.

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "titan/checkpoint/state_table.h"

namespace titan::checkpoint {

constexpr int kFormatVersion = 1;
constexpr const char* kManifestName = "manifest.json";
constexpr int64_t kMaxManifestBytes = 100'000'000;

/// XXH3, 128 bits, as 32 hexadecimal digits: finds damage, not forgery.
std::string digest_of(std::string_view bytes);

/// A rank's file as the manifest knows it.
struct FileRecord {
  int64_t num_bytes = 0;
  std::string header_digest;  ///< of the 8 length bytes and the JSON text
  friend bool operator==(const FileRecord&, const FileRecord&) = default;
};

struct Manifest {
  std::string run_id;  ///< of the run that wrote it: 32 hexadecimal digits
  int64_t step = 0;
  std::string library;      ///< "titan 0.1.0, torch 2.11.0"
  int64_t num_threads = 0;  ///< of an operation, on each rank: the same number is needed for the same bits
  bool finite = true;       ///< all elements of all floating tensors are
  std::string config;       ///< resolved, as TOML; may be empty
  /// What isn't tensors, by the object's key: "dataloader", "train_state".
  std::map<std::string, std::string> texts;
  StateTable table;
  std::vector<FileRecord> files;  ///< one per rank
};

/// "rank_00003.safetensors"
std::string file_name(int64_t rank);

/// In `config`, `library` and the texts, bytes that aren't UTF-8 become U+FFFD, so that saving goes on.
/// Throws Error for what parse_manifest would refuse.
std::string to_text(const Manifest& manifest);
/// Throws Error that names `path` and what is wrong: a digest that doesn't fit, a newer format, a key that is
/// missing, unknown, there twice or out of its limits, any nesting but the format's, a layout that isn't
/// sound.
Manifest parse_manifest(std::string_view text, const std::filesystem::path& path);
/// Of a checkpoint's folder. Throws Error as parse_manifest does, and where the file can't be read.
Manifest read_manifest(const std::filesystem::path& folder);

}  // namespace titan::checkpoint
