// Parses the header of a rank's file of a checkpoint: safetensors with boxes and checksums in the metadata.

#include "checkpoint/format/rank_file.h"

#include <ATen/ops/from_blob.h>

#include "checkpoint/format/safetensors_header.h"
#include "fuzz.h"

namespace titan::fuzz {
namespace {

using checkpoint::RankFile;
using checkpoint::detail::RankFileHeader;

constexpr const char* kFile = "strange/rank_00000.safetensors";

RankFileHeader parse(std::string_view file) {
  const size_t length = titan::detail::checked_header_length(file, file.size(), kFile);
  const size_t data_start = sizeof(uint64_t) + length;
  return checkpoint::detail::parse_rank_file_header(file.substr(sizeof(uint64_t), length), data_start,
                                                    file.size(), kFile);
}

void require_sound(const RankFile::Entry& entry, size_t file_size) {
  require(entry.offset >= 0 && entry.num_bytes >= 0, "an entry has an offset and a size");
  require(static_cast<size_t>(entry.offset + entry.num_bytes) <= file_size, "an entry lies in the file");
  require(entry.box.offset.size() == entry.box.length.size(), "a box has as many offsets as lengths");
  require(static_cast<int64_t>(entry.checksums.size()) == checkpoint::detail::num_blocks(entry.num_bytes),
          "every block has a checksum");
}

bool in_order_of_size(const std::vector<checkpoint::PieceToWrite>& pieces) {
  return std::is_sorted(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) {
    return a.data.element_size() > b.data.element_size();
  });
}

// The same tensors as the writer would write them.
void require_reads_back(const RankFileHeader& header, std::string_view file) {
  std::vector<checkpoint::PieceToWrite> pieces;
  checkpoint::detail::Checksums checksums;
  for (const std::string& name : header.names) {
    const RankFile::Entry& entry = header.entries.at(name);
    char* bytes = const_cast<char*>(file.data()) + entry.offset;  // nothing writes there
    pieces.push_back({name, entry.box, at::from_blob(bytes, entry.box.length, at::dtype(entry.dtype))});
    checksums.push_back(entry.checksums);
  }
  if (!in_order_of_size(pieces)) return;
  const std::string bytes = checkpoint::detail::make_rank_file_header(header.identity, pieces, checksums);
  size_t total = bytes.size();
  for (const auto& [name, entry] : header.entries) total += static_cast<size_t>(entry.num_bytes);
  std::string again = bytes;
  again.resize(total);
  const RankFileHeader read = parse(again);
  require(read.identity == header.identity, "the identity reads back");
  require(read.entries.size() == header.entries.size(), "as many tensors read back");
  for (const auto& [name, entry] : header.entries) {
    const RankFile::Entry& other = read.entries.at(name);
    require(other.dtype == entry.dtype && other.box == entry.box && other.num_bytes == entry.num_bytes &&
                other.checksums == entry.checksums,
            "what is said of a tensor reads back");
  }
}

}  // namespace

void fuzz_input(std::string_view file) {
  RankFileHeader header;
  if (!accepted(kFile, [&] { header = parse(file); })) return;
  require(header.names.size() == header.entries.size(), "a name for every entry");
  for (const auto& [name, entry] : header.entries) require_sound(entry, file.size());
  require_reads_back(header, file);
}

}  // namespace titan::fuzz
