#pragma once

// [Note: header of a rank's file]
// A safetensors header, in whose __metadata__ stand
//   "format"                             "titan rank file 1"
//   "run_id" "step" "rank" "world_size"  whose file it is
//   NAME of each tensor                  "0:512,256:512 xxh3:0123456789abcdef,89abcdef01234567"
// A tensor's value is its box in the global tensor, begin:end of each dimension (of a scalar nothing, nor the
// space), and a checksum of each block. Checksums have a fixed width, so that a header's length is known
// before them. The file is well-formed safetensors for everybody else.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "titan/checkpoint/rank_file.h"

namespace titan::checkpoint::detail {

/// Per piece, its blocks' checksums.
using Checksums = std::vector<std::vector<uint64_t>>;

/// As many as the pieces have blocks, all 0.
Checksums blank_checksums(std::span<const PieceToWrite> pieces);

/// The 8 length bytes and the JSON text; the pieces' bytes follow in order, without gaps. Throws Error for
/// pieces that can't be in a file: of a reserved name, not of their box's lengths, not in StateTable's order.
std::string make_rank_file_header(const FileIdentity& identity, std::span<const PieceToWrite> pieces,
                                  const Checksums& checksums);

struct RankFileHeader {
  FileIdentity identity;
  std::vector<std::string> names;  // by offset
  std::map<std::string, RankFile::Entry, std::less<>> entries;
};

/// Parses the JSON text; `data_start` is the first byte behind it. Throws Error naming `path`, and the
/// tensor, for whatever breaks the rules of safetensors or those above.
RankFileHeader parse_rank_file_header(std::string_view json, size_t data_start, size_t file_size,
                                      const std::string& path);

/// "it is of step 400, not 500"; empty when they are equal.
std::string difference(const FileIdentity& found, const FileIdentity& expected);

}  // namespace titan::checkpoint::detail
