#include "titan/checkpoint/safetensors.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <deque>
#include <set>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>
#include <nlohmann/json.hpp>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/format/safetensors_header.h"
#include "core/file.h"
#include "core/json.h"
#include "titan/checkpoint/storage.h"
#include "titan/core/error.h"

// [Note: rules of the header] They follow the format's reference reader and, where that is lax, its
// specification: the length is at most 100 MB and inside the file; the text is UTF-8, starts with '{' and is
// padded with spaces only; no key is duplicated (readers that keep the first and readers that keep the last
// would see different files); `__metadata__` maps strings to strings; sizes are computed with overflow
// checks; sorted by offset, the tensors start at 0, touch each other and end with the file. The text is read
// by events, not into a tree, so nesting deeper than a header's three levels is refused at once.

static_assert(std::endian::native == std::endian::little, "tensors are mapped as they lie in the file");

namespace titan {
namespace detail {
namespace {

using Row = std::pair<std::string_view, c10::ScalarType>;
constexpr std::array<Row, 12> kDtypes = {{
    {"F64", c10::ScalarType::Double},
    {"F32", c10::ScalarType::Float},
    {"F16", c10::ScalarType::Half},
    {"BF16", c10::ScalarType::BFloat16},
    {"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
    {"F8_E5M2", c10::ScalarType::Float8_e5m2},
    {"I64", c10::ScalarType::Long},
    {"I32", c10::ScalarType::Int},
    {"I16", c10::ScalarType::Short},
    {"I8", c10::ScalarType::Char},
    {"U8", c10::ScalarType::Byte},
    {"BOOL", c10::ScalarType::Bool},
}};

using nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kMaxRank = 64;
// A tensor takes several times as much memory as text.
constexpr size_t kMaxTensors = 1'000'000;
constexpr size_t kMaxMetadata = kMaxTensors + 1'000;  // a rank's file has one for each tensor
constexpr const char* kMetadataKey = "__metadata__";

// One entry while it is being read.
struct RawEntry {
  std::string name;
  std::optional<std::string> dtype;
  std::optional<std::vector<uint64_t>> shape;
  std::optional<std::vector<uint64_t>> data_offsets;
};

bool has_control_character(std::string_view text) {
  return std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

/// Checks the header's grammar.
class HeaderEvents final : public JsonEvents {
 public:
  std::deque<RawEntry> entries;  // a vector of many small ones would take a multiple of the text at once
  SafetensorsMetadata metadata;

  std::string null() override { return unexpected("null"); }
  std::string boolean(bool) override { return unexpected("a boolean"); }
  std::string real(double) override { return unexpected("a number that is no 64-bit integer"); }
  std::string integer(int64_t value) override {
    return value < 0 ? unexpected("a negative number") : large_integer(static_cast<uint64_t>(value));
  }
  std::string large_integer(uint64_t value) override {
    if (state_ != State::Array) return unexpected("a number");
    array_->push_back(value);
    return array_->size() > kMaxRank ? str("an array of more than ", kMaxRank, " numbers") : "";
  }

  std::string text(std::string& value) override {
    if (state_ == State::Metadata) {
      if (metadata.size() == kMaxMetadata) return str("more than ", kMaxMetadata, " keys of metadata");
      metadata[key_] = value;
      return "";
    }
    if (state_ != State::Entry || key_ != "dtype") return unexpected("a string");
    entries.back().dtype = value;
    return "";
  }

  std::string open(bool is_array) override {
    if (is_array) return open_array();
    if (state_ == State::Start) return enter(State::Root);
    if (state_ != State::Root) return unexpected("an object");
    if (key_ == kMetadataKey) return enter(State::Metadata);
    if (entries.size() == kMaxTensors) return str("more than ", kMaxTensors, " tensors");
    entries.push_back({.name = key_, .dtype = {}, .shape = {}, .data_offsets = {}});
    return enter(State::Entry);
  }

  std::string close() override {
    if (state_ == State::Array) return enter(State::Entry);
    if (state_ == State::Entry) {
      const RawEntry& entry = entries.back();
      // Checked at once: an incomplete entry takes much less text than memory.
      if (!entry.dtype || !entry.shape || !entry.data_offsets)
        return str("tensor '", entry.name, "': needs dtype, shape and data_offsets");
    }
    return enter(state_ == State::Root ? State::End : State::Root);
  }

  std::string key(std::string& value) override {
    key_ = value;
    if (state_ == State::Root) return root_key();
    if (state_ == State::Metadata)
      return metadata.count(key_) == 0 ? "" : str("metadata key '", key_, "' occurs twice");
    return entry_key();
  }

  std::string syntax_error(size_t position, const std::string& reason) override {
    return str("header is not valid JSON at byte ", position, ": ", reason);
  }

 private:
  enum class State { Start, Root, Metadata, Entry, Array, End };

  std::string enter(State state) {
    state_ = state;
    return "";
  }

  std::string open_array() {
    const bool is_shape = key_ == "shape";
    if (state_ != State::Entry || (!is_shape && key_ != "data_offsets")) return unexpected("an array");
    array_ = &(is_shape ? entries.back().shape : entries.back().data_offsets).emplace();
    return enter(State::Array);
  }

  std::string root_key() {
    if (has_control_character(key_)) return "a tensor's name contains control characters";
    return names_.insert(key_).second ? "" : str("tensor '", key_, "' occurs twice");
  }

  std::string entry_key() const {
    const RawEntry& entry = entries.back();
    const bool known = key_ == "dtype" || key_ == "shape" || key_ == "data_offsets";
    if (!known) return str("tensor '", entry.name, "': unknown key '", key_, "'");
    const bool twice = (key_ == "dtype" && entry.dtype) || (key_ == "shape" && entry.shape) ||
                       (key_ == "data_offsets" && entry.data_offsets);
    return twice ? str("tensor '", entry.name, "': key '", key_, "' occurs twice") : "";
  }

  std::string unexpected(const char* what) const {
    if (state_ == State::Metadata) return str("metadata '", key_, "' must be a string, not ", what);
    if (state_ == State::Start) return str("header must be an object, not ", what);
    if (state_ == State::Root) return str("tensor '", key_, "' must be described by an object, not ", what);
    return str("tensor '", entries.back().name, "': ", what, " in '", key_, "'");
  }

  State state_ = State::Start;
  std::string key_;
  std::vector<uint64_t>* array_ = nullptr;
  std::set<std::string> names_;
};

// The size of the tensor in bytes; empty when it doesn't fit into 63 bits. Sizes of 0 count as 1 for that,
// because strides are products too.
std::optional<int64_t> checked_num_bytes(const std::vector<uint64_t>& shape, size_t element_size) {
  int64_t num_bytes = static_cast<int64_t>(element_size);
  bool empty = false;
  for (uint64_t size : shape) {
    empty |= size == 0;
    if (size > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    int64_t factor = std::max<int64_t>(static_cast<int64_t>(size), 1);
    if (__builtin_mul_overflow(num_bytes, factor, &num_bytes)) return std::nullopt;
  }
  return empty ? 0 : num_bytes;
}

SafetensorsInfo checked_info(const RawEntry& entry, size_t data_start, size_t data_bytes,
                             const std::string& where) {
  TITAN_CHECK(entry.dtype && entry.shape && entry.data_offsets, where, "needs dtype, shape and data_offsets");
  auto dtype = dtype_of_safetensors_name(*entry.dtype);
  TITAN_CHECK(dtype, where, "unknown dtype '", *entry.dtype, "'");
  TITAN_CHECK(entry.data_offsets->size() == 2, where, "data_offsets must be two numbers");
  uint64_t begin = (*entry.data_offsets)[0], end = (*entry.data_offsets)[1];
  TITAN_CHECK(begin <= end && end <= data_bytes, where, "bytes ", begin, " to ", end,
              " are outside the file's data part of ", data_bytes, " bytes");
  auto num_bytes = checked_num_bytes(*entry.shape, c10::elementSize(*dtype));
  TITAN_CHECK(num_bytes, where, "the shape's size overflows");
  TITAN_CHECK(static_cast<uint64_t>(*num_bytes) == end - begin, where, "shape and dtype make ", *num_bytes,
              " bytes, data_offsets ", end - begin);
  return {.dtype = *dtype,
          .shape = {entry.shape->begin(), entry.shape->end()},
          .offset = static_cast<int64_t>(data_start + begin),
          .num_bytes = *num_bytes};
}

// Sorted by offset (tensors without elements first among equals), each has to start where the one before
// ended.
void check_tiling(SafetensorsHeader& header, size_t data_start, size_t file_size, const std::string& path) {
  auto place = [&](const std::string& name) {
    const auto& info = header.tensors.at(name);
    return std::pair{info.offset, info.num_bytes};
  };
  std::sort(header.names.begin(), header.names.end(),
            [&](const std::string& a, const std::string& b) { return place(a) < place(b); });
  int64_t position = static_cast<int64_t>(data_start);
  for (const auto& name : header.names) {
    auto [offset, num_bytes] = place(name);
    TITAN_CHECK(offset == position, path, ": tensor '", name,
                "': ", offset < position ? "overlaps the one before" : "leaves a hole before it",
                " (starts at byte ", offset, " of the file, expected ", position, ")");
    position = offset + num_bytes;
  }
  TITAN_CHECK(position == static_cast<int64_t>(file_size), path, ": the tensors end at byte ", position,
              ", the file at ", file_size);
}

std::string_view without_padding(std::string_view json) {
  return json.substr(0, json.find_last_not_of(' ') + 1);
}

}  // namespace

std::optional<c10::ScalarType> dtype_of_safetensors_name(std::string_view name) {
  const auto* const row = std::ranges::find(kDtypes, name, &Row::first);
  return row == kDtypes.end() ? std::nullopt : std::optional(row->second);
}

std::string_view safetensors_name_of(c10::ScalarType dtype) {
  const auto* const row = std::ranges::find(kDtypes, dtype, &Row::second);
  TITAN_CHECK(row != kDtypes.end(), "safetensors can't hold tensors of dtype ", c10::toString(dtype));
  return row->first;
}

std::string no_tensor_text(const std::string& path, std::string_view name,
                           const std::vector<std::string>& known) {
  std::string text = str(path, ": no tensor '", name, "'");
  for (const auto& near : nearest_names(name, known, 3)) text += str("; there is '", near, "'");
  return text;
}

bool is_inside(const Box& box, const std::vector<int64_t>& shape) {
  if (box.offset.size() != shape.size() || box.length.size() != shape.size()) return false;
  for (size_t dim = 0; dim < shape.size(); ++dim)
    if (box.offset[dim] < 0 || box.length[dim] < 0 || box.offset[dim] > shape[dim] ||
        box.length[dim] > shape[dim] - box.offset[dim])
      return false;
  return true;
}

size_t checked_header_length(std::string_view beginning, size_t file_size, const std::string& path) {
  TITAN_CHECK(file_size >= sizeof(uint64_t) && beginning.size() >= sizeof(uint64_t), path,
              ": not a safetensors file: ", file_size, " bytes, at least 8 expected");
  uint64_t length = 0;
  std::memcpy(&length, beginning.data(), sizeof length);
  TITAN_CHECK(length <= kMaxHeaderBytes, path, ": header of ", length, " bytes; at most ", kMaxHeaderBytes,
              " are allowed");
  TITAN_CHECK(length <= file_size - sizeof length, path, ": truncated: header of ", length,
              " bytes in a file of ", file_size);
  return length;
}

SafetensorsHeader parse_safetensors_header(std::string_view json_text, size_t data_start, size_t file_size,
                                           const std::string& path) {
  std::string_view text = without_padding(json_text);
  TITAN_CHECK(text.starts_with('{') && text.ends_with('}'), path,
              ": header must start with '{' and end with '}', padded with spaces only");
  HeaderEvents events;
  const std::string problem = read_json(text, events);
  TITAN_CHECK(problem.empty(), path, ": ", problem);

  SafetensorsHeader header;
  header.metadata = std::move(events.metadata);
  for (const auto& entry : events.entries) {
    std::string where = str(path, ": tensor '", entry.name, "': ");
    header.tensors.emplace(entry.name, checked_info(entry, data_start, file_size - data_start, where));
    header.names.push_back(entry.name);
  }
  check_tiling(header, data_start, file_size, path);
  return header;
}

std::string make_safetensors_header(const std::vector<SafetensorsEntry>& entries,
                                    const SafetensorsMetadata& metadata) {
  TITAN_CHECK(entries.size() <= kMaxTensors && metadata.size() <= kMaxMetadata, "a file of ", entries.size(),
              " tensors and ", metadata.size(), " metadata; at most ", kMaxTensors, " and ", kMaxMetadata,
              " are allowed");
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  if (!metadata.empty()) root[kMetadataKey] = metadata;
  // An ordered object is a list; looking up each name in it would take quadratic time.
  auto& members = root.get_ref<nlohmann::ordered_json::object_t&>();
  std::set<std::string_view> names;
  int64_t position = 0;
  for (const auto& entry : entries) {
    TITAN_CHECK(entry.name != kMetadataKey && !has_control_character(entry.name), "'", entry.name,
                "' can't name a tensor");
    TITAN_CHECK(names.insert(entry.name).second, "tensor '", entry.name, "' is given twice");
    auto num_bytes =
        checked_num_bytes({entry.shape.begin(), entry.shape.end()}, c10::elementSize(entry.dtype));
    TITAN_CHECK(num_bytes, "tensor '", entry.name, "': the shape's size overflows");
    nlohmann::ordered_json value = {{"dtype", safetensors_name_of(entry.dtype)},
                                    {"shape", entry.shape},
                                    {"data_offsets", {position, position + *num_bytes}}};
    members.push_back({entry.name, std::move(value)});
    position += *num_bytes;
  }
  std::string text = root.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  uint64_t length = text.size();
  TITAN_CHECK(length <= kMaxHeaderBytes, "a header of ", length, " bytes is above the format's limit");
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + text;
}

}  // namespace detail

// The checksums of a tensor's blocks. A block is compared once, when some of it is read for the first time.
struct CheckedBlocks {
  std::vector<uint64_t> checksums;
  std::unique_ptr<std::atomic<bool>[]> sound;
};

struct SafetensorsFile::Contents {
  std::filesystem::path path;
  MappedFile map;
  detail::SafetensorsHeader header;
  std::map<std::string, CheckedBlocks, std::less<>> blocks = {};  // empty for a file without checksums
};

namespace {

// LibTorch takes a mutable pointer; nothing writes through it.
void* address_of(const MappedFile& map, int64_t offset) {
  return const_cast<std::byte*>(map.bytes().data() + offset);
}

bool is_aligned(const void* address, size_t alignment) {
  return reinterpret_cast<uintptr_t>(address) % alignment == 0;
}

void check_box(const Box& box, const SafetensorsInfo& info, std::string_view name, const std::string& path) {
  TITAN_CHECK(detail::is_inside(box, info.shape), path, ": tensor '", name, "' of shape ",
              at::IntArrayRef(info.shape), " has no part at ", at::IntArrayRef(box.offset), " of lengths ",
              at::IntArrayRef(box.length));
}

std::map<std::string, CheckedBlocks, std::less<>> blocks_of(const detail::SafetensorsHeader& header,
                                                            const std::string& path) {
  std::map<std::string, CheckedBlocks, std::less<>> blocks;
  for (auto& [name, entry] : checkpoint::detail::checked_entries(header, path)) {
    const size_t count = entry.checksums.size();
    blocks[name] = {entry.checksums, std::make_unique<std::atomic<bool>[]>(count)};
  }
  return blocks;
}

// The first and one past the last byte of the tensor that hold elements of a box, which isn't empty.
std::pair<int64_t, int64_t> byte_range(const Box& box, const SafetensorsInfo& info) {
  int64_t first = 0, last = 0;
  for (size_t dim = 0; dim < box.length.size(); ++dim) {
    first = first * info.shape[dim] + box.offset[dim];
    last = last * info.shape[dim] + box.offset[dim] + box.length[dim] - 1;
  }
  const auto element_size = static_cast<int64_t>(c10::elementSize(info.dtype));
  return {first * element_size, (last + 1) * element_size};
}

}  // namespace

void SafetensorsFile::check_blocks(std::string_view name, const Box& box) const {
  const auto found = contents_->blocks.find(name);
  if (found == contents_->blocks.end()) return;
  const SafetensorsInfo& about = info(name);
  const auto& [checksums, sound] = found->second;
  const auto [first, end] = byte_range(box, about);
  for (int64_t block = first / checkpoint::kBlockBytes; block * checkpoint::kBlockBytes < end; ++block) {
    const auto index = static_cast<size_t>(block);
    if (sound[index].load(std::memory_order_acquire)) continue;
    const int64_t begin = block * checkpoint::kBlockBytes;
    const int64_t length = std::min(checkpoint::kBlockBytes, about.num_bytes - begin);
    const auto bytes = contents_->map.bytes().subspan(static_cast<size_t>(about.offset + begin),
                                                      static_cast<size_t>(length));
    if (checkpoint::detail::checksum_of(bytes) != checksums[index])
      throw ConfigError(str(path().string(), ": tensor '", name, "' is damaged: block ", block, " of ",
                            checksums.size(), " (bytes ", about.offset + begin, " to ",
                            about.offset + begin + length, " of the file) doesn't match its checksum"));
    sound[index].store(true, std::memory_order_release);
  }
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) {
  MappedFile map(path);
  size_t data_start =
      sizeof(uint64_t) + detail::checked_header_length(map.text(), map.text().size(), path.string());
  auto header =
      detail::parse_safetensors_header(map.text().substr(sizeof(uint64_t), data_start - sizeof(uint64_t)),
                                       data_start, map.text().size(), path.string());
  auto blocks = blocks_of(header, path.string());
  contents_ =
      std::make_shared<const Contents>(Contents{path, std::move(map), std::move(header), std::move(blocks)});
}

const std::filesystem::path& SafetensorsFile::path() const { return contents_->path; }
const std::vector<std::string>& SafetensorsFile::names() const { return contents_->header.names; }
const SafetensorsMetadata& SafetensorsFile::metadata() const { return contents_->header.metadata; }

bool SafetensorsFile::contains(std::string_view name) const {
  return contents_->header.tensors.find(name) != contents_->header.tensors.end();
}

const SafetensorsInfo& SafetensorsFile::info(std::string_view name) const {
  auto found = contents_->header.tensors.find(name);
  if (found != contents_->header.tensors.end()) return found->second;
  throw Error(detail::no_tensor_text(path().string(), name, names()));
}

at::Tensor SafetensorsFile::tensor(std::string_view name) const {
  const SafetensorsInfo& about = info(name);
  void* data = address_of(contents_->map, about.offset);
  bool viewable = about.num_bytes > 0 && is_aligned(data, c10::elementSize(about.dtype));
  const Box whole{std::vector<int64_t>(about.shape.size(), 0), about.shape};
  if (!viewable) return read_slice(name, whole);
  check_blocks(name, whole);
  auto keep_map = [contents = contents_](void*) {};
  return at::from_blob(data, about.shape, keep_map, at::dtype(about.dtype));
}

void SafetensorsFile::drop_pages() const {
  const auto bytes = contents_->map.bytes();
  // Only a hint: if it is ignored the pages stay until memory is short.
  if (!bytes.empty()) ::madvise(const_cast<std::byte*>(bytes.data()), bytes.size(), MADV_DONTNEED);
}

at::Tensor SafetensorsFile::read_slice(std::string_view name, const Box& box) const {
  const SafetensorsInfo& about = info(name);
  check_box(box, about, name, path().string());
  at::Tensor slice = at::empty(box.length, at::dtype(about.dtype));
  read_slice(name, box, slice);
  return slice;
}

void SafetensorsFile::read_slice(std::string_view name, const Box& box, const at::Tensor& target) const {
  const SafetensorsInfo& about = info(name);
  check_box(box, about, name, path().string());
  TITAN_CHECK(target.device().is_cpu() && target.is_contiguous() && target.scalar_type() == about.dtype &&
                  target.sizes() == at::IntArrayRef(box.length),
              path().string(), ": '", name, "' is read into a contiguous tensor ",
              at::IntArrayRef(box.length), " of ", about.dtype, " on the CPU, given ", target.sizes(), " of ",
              target.scalar_type(), " on ", target.device());
  if (target.numel() == 0) return;
  check_blocks(name, box);
  // As bytes, [..., element size], alignment doesn't matter.
  auto element_size = static_cast<int64_t>(target.element_size());
  std::vector<int64_t> byte_shape = about.shape;
  byte_shape.push_back(element_size);
  at::Tensor bytes =
      at::from_blob(address_of(contents_->map, about.offset), byte_shape, at::dtype(at::kByte));
  for (size_t dim = 0; dim < box.length.size(); ++dim) {
    bytes = bytes.narrow(static_cast<int64_t>(dim), box.offset[dim], box.length[dim]);
  }
  at::from_blob(target.data_ptr(), bytes.sizes(), at::dtype(at::kByte)).copy_(bytes);
}

}  // namespace titan
