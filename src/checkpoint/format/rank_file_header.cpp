// Writes and reads the header of a rank's file: each tensor's piece, its checksums, and the file's identity.

#include "checkpoint/format/rank_file.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>

#include "checkpoint/format/safetensors_header.h"
#include "core/hash.h"
#include "titan/core/error.h"

namespace titan::checkpoint {
namespace detail {
namespace {

constexpr const char* kFormat = "titan rank file 1";
constexpr std::array<std::string_view, 5> kReservedNames = {"format", "run_id", "step", "rank", "world_size"};
constexpr std::string_view kChecksumPrefix = "xxh3:";
constexpr size_t kChecksumDigits = 16;

bool is_reserved(std::string_view name) {
  return std::find(kReservedNames.begin(), kReservedNames.end(), name) != kReservedNames.end();
}

// ---- writing

void check_piece(const PieceToWrite& piece) {
  TITAN_CHECK(piece.data.defined(), "'", piece.name, "': the tensor to write is undefined");
  TITAN_CHECK(!is_reserved(piece.name), "'", piece.name,
              "' can't name a tensor of a rank's file: the file uses that key itself");
  TITAN_CHECK(piece.data.device().is_cpu() && piece.data.is_contiguous(), "'", piece.name,
              "': the tensor to write has to be contiguous and on the CPU; it is ", piece.data.sizes(),
              " with strides ", piece.data.strides(), " on ", piece.data.device());
  TITAN_CHECK(piece.data.sizes() == at::IntArrayRef(piece.box.length) &&
                  piece.box.offset.size() == piece.box.length.size(),
              "'", piece.name, "': a tensor of ", piece.data.sizes(), " for a box at ",
              at::IntArrayRef(piece.box.offset), " of lengths ", at::IntArrayRef(piece.box.length));
  for (size_t dim = 0; dim < piece.box.offset.size(); ++dim) {
    int64_t end = 0;
    TITAN_CHECK(piece.box.offset[dim] >= 0 &&
                    !__builtin_add_overflow(piece.box.offset[dim], piece.box.length[dim], &end),
                "'", piece.name, "': no tensor has a box at ", at::IntArrayRef(piece.box.offset));
  }
}

// ---- parsing

// Accepts digits only: no sign, no space. Returns nothing if the number needs more than 63 bits.
std::optional<int64_t> parse_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = !text.empty() && text.front() != '-' && end == text.data() + text.size();
  return whole && error == std::errc() ? std::optional(value) : std::nullopt;
}

// One dimension of a box, "begin:end".
bool append_range(Box& box, std::string_view text) {
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return false;
  const auto begin = parse_number(text.substr(0, colon)), end = parse_number(text.substr(colon + 1));
  if (!begin || !end || *end < *begin) return false;
  box.offset.push_back(*begin);
  box.length.push_back(*end - *begin);
  return true;
}

std::optional<Box> parse_box(std::string_view text) {
  Box box;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    if (comma == text.size() - 1 || !append_range(box, text.substr(0, comma))) return std::nullopt;
    text.remove_prefix(comma == std::string_view::npos ? text.size() : comma + 1);
  }
  return box;
}

std::optional<uint64_t> parse_checksum(std::string_view digits) {
  const auto is_digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  if (!std::all_of(digits.begin(), digits.end(), is_digit)) return std::nullopt;
  uint64_t value = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  return value;
}

// Returns nothing unless there are exactly `count`.
std::optional<std::vector<uint64_t>> parse_checksums(std::string_view text, int64_t count) {
  const auto expected_size = static_cast<size_t>(count) * (kChecksumDigits + 1);
  if (text.size() + (count > 0 ? 1 : 0) != expected_size) return std::nullopt;
  std::vector<uint64_t> checksums;
  for (size_t at = 0; at < text.size(); at += kChecksumDigits + 1) {
    if (at > 0 && text[at - 1] != ',') return std::nullopt;
    const auto checksum = parse_checksum(text.substr(at, kChecksumDigits));
    if (!checksum) return std::nullopt;
    checksums.push_back(*checksum);
  }
  return checksums;
}

RankFile::Entry parse_entry(std::string_view value, const SafetensorsInfo& info, const std::string& where) {
  const size_t prefix = value.find(kChecksumPrefix);
  TITAN_CHECK(prefix != std::string_view::npos, where, "its metadata has no '", kChecksumPrefix, "'");
  std::string_view ranges = value.substr(0, prefix);
  const bool spaced = ranges.empty() || ranges.ends_with(' ');
  if (!ranges.empty() && spaced) ranges.remove_suffix(1);
  auto box = parse_box(ranges);
  TITAN_CHECK(box && spaced && ranges.empty() == info.shape.empty(), where, "'", ranges, "' isn't a box");
  TITAN_CHECK(box->length == info.shape, where, "its box '", ranges, "' doesn't have its shape ",
              at::IntArrayRef(info.shape));
  const int64_t count = num_blocks(info.num_bytes);
  auto checksums = parse_checksums(value.substr(prefix + kChecksumPrefix.size()), count);
  TITAN_CHECK(checksums, where, "its metadata doesn't hold ", count, " checksums of ", kChecksumDigits,
              " hexadecimal digits");
  return {.dtype = info.dtype,
          .box = std::move(*box),
          .offset = info.offset,
          .num_bytes = info.num_bytes,
          .checksums = std::move(*checksums)};
}

const std::string& metadata_of(const titan::detail::SafetensorsHeader& header, const std::string& key,
                               const std::string& path) {
  const auto found = header.metadata.find(key);
  TITAN_CHECK(found != header.metadata.end(), path,
              ": not a rank's file of a checkpoint: its metadata has no '", key, "'");
  return found->second;
}

FileIdentity parse_identity(const titan::detail::SafetensorsHeader& header, const std::string& path) {
  const std::string& format = metadata_of(header, "format", path);
  TITAN_CHECK(format == kFormat, path, ": its format is '", format, "'; this program reads '", kFormat, "'");
  const auto number = [&](const char* key) {
    const std::string& text = metadata_of(header, key, path);
    const auto value = parse_number(text);
    TITAN_CHECK(value, path, ": metadata '", key, "' is '", text, "', not a number from 0 to 2^63 - 1");
    return *value;
  };
  return {.run_id = metadata_of(header, "run_id", path),
          .step = number("step"),
          .rank = number("rank"),
          .world_size = number("world_size")};
}

// ---- checksums

// Adding one to the last place of an exponent carries into the sign bit if and only if the exponent is all
// ones. Every instruction set can vectorize that, unlike comparisons of 64-bit words.
template <class Word>
bool no_full_exponent(std::span<const std::byte> bytes, Word exponent, Word last_place) {
  constexpr Word kSign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  Word carried = 0;
  for (size_t i = 0; i < bytes.size() / sizeof(Word); ++i) {
    Word word;
    std::memcpy(&word, bytes.data() + i * sizeof word, sizeof word);
    carried = static_cast<Word>(carried | static_cast<Word>((word & exponent) + last_place));
  }
  return (carried & kSign) == 0;
}

}  // namespace

std::string box_text(const Box& box) {
  std::string text;
  for (size_t dim = 0; dim < box.offset.size(); ++dim)
    text += str(dim == 0 ? "" : ",", box.offset[dim], ":", box.offset[dim] + box.length[dim]);
  return text;
}

std::string piece_text(const Box& box, const std::vector<uint64_t>& checksums) {
  std::string text = box_text(box);
  if (!text.empty()) text += ' ';
  text += kChecksumPrefix;
  for (size_t block = 0; block < checksums.size(); ++block) {
    if (block > 0) text += ',';
    text += hex(checksums[block]);
  }
  return text;
}

Checksums blank_checksums(std::span<const PieceToWrite> pieces) {
  Checksums checksums;
  for (const PieceToWrite& piece : pieces) {
    const auto num_bytes = piece.data.defined() ? static_cast<int64_t>(piece.data.nbytes()) : 0;
    checksums.emplace_back(static_cast<size_t>(num_blocks(num_bytes)));
  }
  return checksums;
}

std::string make_rank_file_header(const FileIdentity& identity, std::span<const PieceToWrite> pieces,
                                  const Checksums& checksums) {
  SafetensorsMetadata metadata = {{"format", kFormat},
                                  {"run_id", identity.run_id},
                                  {"step", std::to_string(identity.step)},
                                  {"rank", std::to_string(identity.rank)},
                                  {"world_size", std::to_string(identity.world_size)}};
  std::vector<SafetensorsEntry> entries;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const PieceToWrite& piece = pieces[i];
    check_piece(piece);
    // So that each tensor is aligned in the file.
    TITAN_CHECK(i == 0 || piece.data.element_size() <= pieces[i - 1].data.element_size(), "'", piece.name,
                "' has larger elements than '", pieces[i - 1].name, "' before it");
    metadata[piece.name] = piece_text(piece.box, checksums[i]);
    entries.push_back({piece.name, piece.data.scalar_type(), piece.box.length});
  }
  return titan::detail::make_safetensors_header(entries, metadata);
}

RankFileHeader parse_rank_file_header(std::string_view json, size_t data_start, size_t file_size,
                                      const std::string& path) {
  auto parsed = titan::detail::parse_safetensors_header(json, data_start, file_size, path);
  RankFileHeader header{
      .identity = parse_identity(parsed, path), .names = std::move(parsed.names), .entries = {}};
  for (const auto& [name, info] : parsed.tensors) {
    TITAN_CHECK(!is_reserved(name), path, ": a tensor of a rank's file can't be named '", name, "'");
    const std::string& value = metadata_of(parsed, name, path);
    header.entries.emplace(name, parse_entry(value, info, str(path, ": tensor '", name, "': ")));
  }
  for (const auto& [key, value] : parsed.metadata)
    TITAN_CHECK(is_reserved(key) || header.entries.contains(key), path, ": metadata '", key,
                "' belongs to no tensor in the file");
  return header;
}

std::map<std::string, RankFile::Entry, std::less<>> checked_entries(
    const titan::detail::SafetensorsHeader& header, const std::string& path) {
  std::map<std::string, RankFile::Entry, std::less<>> entries;
  const auto form = header.metadata.find(kChecksumsKey);
  if (form == header.metadata.end()) return entries;
  TITAN_CHECK(form->second == kChecksumsForm, path, ": its checksums have the form '", form->second,
              "'; this program reads '", kChecksumsForm, "'");
  for (const auto& [name, info] : header.tensors) {
    const std::string where = str(path, ": tensor '", name, "': ");
    const auto value = header.metadata.find(name);
    TITAN_CHECK(value != header.metadata.end(), where, "its metadata has no checksums");
    RankFile::Entry entry = parse_entry(value->second, info, where);
    TITAN_CHECK(std::ranges::all_of(entry.box.offset, [](int64_t begin) { return begin == 0; }), where,
                "its box '", box_text(entry.box), "' isn't the whole tensor");
    entries.emplace(name, std::move(entry));
  }
  return entries;
}

std::string difference(const FileIdentity& found, const FileIdentity& expected) {
  if (found.run_id != expected.run_id)
    return str("it belongs to run '", found.run_id, "', not '", expected.run_id, "'");
  if (found.step != expected.step) return str("it belongs to step ", found.step, ", not ", expected.step);
  if (found.rank != expected.rank) return str("it belongs to rank ", found.rank, ", not ", expected.rank);
  if (found.world_size != expected.world_size)
    return str("it was saved by ", found.world_size, " ranks, not by ", expected.world_size);
  return "";
}

uint64_t checksum_of(std::span<const std::byte> block) { return XXH3_64bits(block.data(), block.size()); }

bool all_finite(std::span<const std::byte> bytes, at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return no_full_exponent<uint64_t>(bytes, 0x7ff0'0000'0000'0000, 0x0010'0000'0000'0000);
    case at::kFloat:
      return no_full_exponent<uint32_t>(bytes, 0x7f80'0000, 0x0080'0000);
    case at::kHalf:
      return no_full_exponent<uint16_t>(bytes, 0x7c00, 0x0400);
    case at::kBFloat16:
      return no_full_exponent<uint16_t>(bytes, 0x7f80, 0x0080);
    case at::kFloat8_e5m2:
      return no_full_exponent<uint8_t>(bytes, 0x7c, 0x04);
    case at::kFloat8_e4m3fn:  // has no infinities, and one NaN: all ones
      return no_full_exponent<uint8_t>(bytes, 0x7f, 0x01);
    default:
      return true;
  }
}

}  // namespace detail

std::string digest_of(std::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return hex(hash.high64) + hex(hash.low64);
}

}  // namespace titan::checkpoint
