#include "titan/checkpoint/rank_file.h"

#include <algorithm>
#include <utility>

#include "block_checks.h"
#include "input_file.h"
#include "piece_reader.h"
#include "rank_file_header.h"
#include "safetensors_header.h"
#include "titan/core/error.h"

namespace titan::checkpoint {

using detail::BlockReader;

struct RankFile::Impl {
  explicit Impl(const std::filesystem::path& path) : file(path) {}

  detail::InputFile file;
  detail::RankFileHeader header;
};

namespace {

// The 8 length bytes and the JSON text.
std::string read_header(const detail::InputFile& file) {
  const auto file_size = static_cast<size_t>(file.num_bytes());
  std::string bytes(std::min<size_t>(sizeof(uint64_t), file_size), '\0');
  file.read(std::as_writable_bytes(std::span(bytes)), 0);
  const size_t length = titan::detail::checked_header_length(bytes, file_size, file.path().string());
  bytes.resize(sizeof(uint64_t) + length);
  file.read(std::as_writable_bytes(std::span(bytes).subspan(sizeof(uint64_t))), sizeof(uint64_t));
  return bytes;
}

detail::RankFileHeader parse(const std::string& header, const detail::InputFile& file) {
  return detail::parse_rank_file_header(std::string_view(header).substr(sizeof(uint64_t)), header.size(),
                                        static_cast<size_t>(file.num_bytes()), file.path().string());
}

// What a file that isn't the expected one says of itself: a swapped file is told from a damaged one.
std::string what_it_says(const detail::InputFile& file, const FileIdentity& expected) {
  try {
    const std::string other = detail::difference(parse(read_header(file), file).identity, expected);
    return other.empty() ? "" : str("; ", other);
  } catch (const Error&) {
    return "";
  }
}

void check_size(const detail::InputFile& file, const FileIdentity& identity, const FileRecord& record) {
  if (file.num_bytes() == record.num_bytes) return;
  throw Error(str(file.path().string(), ": has ", file.num_bytes(), " bytes; the checkpoint's manifest says ",
                  record.num_bytes, what_it_says(file, identity)));
}

void check_digest(const std::string& header, const detail::InputFile& file, const FileIdentity& identity,
                  const FileRecord& record) {
  const std::string digest = digest_of(header);
  if (digest == record.header_digest) return;
  throw Error(str(file.path().string(), ": its header has digest ", digest,
                  "; the checkpoint's manifest says ", record.header_digest, what_it_says(file, identity)));
}

void check_target(std::string_view name, const RankFile::Entry& entry, const Box& box,
                  const at::Tensor& target) {
  TITAN_CHECK(target.device().is_cpu() && target.scalar_type() == entry.dtype, "'", name, "' is read to a ",
              target.scalar_type(), " tensor on ", target.device(), "; expected ", entry.dtype,
              " on the CPU");
  TITAN_CHECK(box.offset.size() == entry.box.offset.size() && target.sizes() == at::IntArrayRef(box.length),
              "'", name, "' is read to a tensor of ", target.sizes(), " for a box at ",
              at::IntArrayRef(box.offset), " of lengths ", at::IntArrayRef(box.length), ", from one at ",
              at::IntArrayRef(entry.box.offset), " of lengths ", at::IntArrayRef(entry.box.length));
}

// Checks all blocks; what is wrong with the first that is damaged. The pages read are given back: verifying
// a large checkpoint doesn't drive everything else from memory.
std::string verify_entry(const detail::InputFile& file, const std::string& name, const RankFile::Entry& entry,
                         std::span<std::byte> buffer, const std::function<void(int64_t)>& progress) {
  const BlockReader blocks(file, name, entry);
  std::string problem;
  for (int64_t first = 0; first < blocks.num_blocks(); first += detail::kReadBlocks) {
    const int64_t last = std::min(first + detail::kReadBlocks, blocks.num_blocks());
    blocks.read(first, last, buffer.data());
    if (problem.empty()) problem = blocks.damage(first, last, buffer.data());
    const int64_t num_bytes = blocks.end(last - 1) - blocks.begin(first);
    file.drop(entry.offset + blocks.begin(first), num_bytes);
    if (progress) progress(num_bytes);
  }
  return problem;
}

}  // namespace

RankFile::RankFile(const std::filesystem::path& path, const FileIdentity& identity,
                   const FileRecord& record) {
  auto impl = std::make_shared<Impl>(path);
  check_size(impl->file, identity, record);
  const std::string header = read_header(impl->file);
  check_digest(header, impl->file, identity, record);
  impl->header = parse(header, impl->file);
  const std::string other = detail::difference(impl->header.identity, identity);
  if (!other.empty()) throw Error(str(path.string(), ": ", other));
  impl_ = std::move(impl);
}

const std::filesystem::path& RankFile::path() const { return impl_->file.path(); }
const std::vector<std::string>& RankFile::names() const { return impl_->header.names; }
int64_t RankFile::bytes_read() const { return impl_->file.bytes_read(); }

const RankFile::Entry& RankFile::entry(std::string_view name) const {
  const auto found = impl_->header.entries.find(name);
  if (found == impl_->header.entries.end()) throw Error(str(path().string(), ": has no tensor '", name, "'"));
  return found->second;
}

void RankFile::read(std::string_view name, const Box& target_box, const at::Tensor& target) const {
  const Entry& about = entry(name);
  check_target(name, about, target_box, target);
  detail::PieceReader(BlockReader(impl_->file, name, about), about, target_box, target).read();
  impl_->file.check_size();
}

void RankFile::verify(const std::function<void(int64_t bytes)>& progress) const {
  std::vector<std::byte> buffer(static_cast<size_t>(detail::kReadBlocks * kBlockBytes));
  std::string problems;
  for (const std::string& name : names()) {
    const std::string problem = verify_entry(impl_->file, name, entry(name), buffer, progress);
    if (!problem.empty()) problems += (problems.empty() ? "" : "\n") + problem;
  }
  impl_->file.drop(0, 0);  // what lay in units of several tensors
  impl_->file.check_size();
  if (!problems.empty()) throw Error(problems);
}

}  // namespace titan::checkpoint
