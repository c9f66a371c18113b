// Reads tokens from .npy files in their order, for runs that are compared with another program's.

#include "data/feed/feeds.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <set>

#include "core/hash.h"
#include "titan/core/error.h"

namespace titan::data {
namespace {

constexpr std::string_view kNpyMagic = "\x93NUMPY";

// The header: a Python dictionary with exactly three known keys, in any order.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& path) : rest_(text), path_(path) {}

  std::array<int64_t, 3> read_shape() {
    expect("{");
    while (!accept("}")) {
      member(quoted());
      accept(",");
    }
    if (!rest_.empty()) refuse("the header has text after its dictionary");
    if (seen_.size() != 3) refuse("the header lacks one of descr, fortran_order, shape");
    return shape_;
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw ConfigError(str(path_, ": not a readable .npy file: ", why));
  }

  void skip_space() {
    while (!rest_.empty() && (rest_[0] == ' ' || rest_[0] == '\n')) rest_.remove_prefix(1);
  }
  bool accept(std::string_view token) {
    skip_space();
    if (!rest_.starts_with(token)) return false;
    rest_.remove_prefix(token.size());
    skip_space();
    return true;
  }
  void expect(std::string_view token) {
    if (!accept(token)) refuse(str("expected '", token, "' in the header"));
  }

  std::string_view quoted() {
    std::string_view quote = accept("'") ? "'" : "\"";
    if (quote == "\"") expect(quote);
    size_t end = rest_.find(quote);
    if (end == rest_.npos) refuse("a string in the header has no end");
    std::string_view text = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    skip_space();
    return text;
  }

  void member(std::string_view key) {
    expect(":");
    if (!seen_.insert(key).second) refuse("the header has a duplicate key");
    if (key == "descr") {
      if (auto type = quoted(); type != "<i4") refuse(str("its type is ", type, ", expected <i4 (int32)"));
    } else if (key == "fortran_order") {
      if (!accept("False")) refuse("it is in Fortran order; save it in C order");
    } else if (key == "shape") {
      tuple();
    } else {
      refuse(str("the header has the unknown key '", key, "'"));
    }
  }

  void tuple() {
    expect("(");
    size_t count = 0;
    while (!accept(")")) {
      int64_t size = number();
      if (count < 3) shape_[count] = size;
      ++count;
      if (!accept(",") && !rest_.starts_with(")")) refuse("the shape is not a tuple");
    }
    if (count != 3) refuse(str("it has ", count, " dimensions, expected 3: [steps, global batch, sequence]"));
  }

  int64_t number() {
    int64_t value = -1;
    auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error != std::errc() || value < 0) refuse("the shape has an entry that is not a size");
    rest_.remove_prefix(end - rest_.data());
    skip_space();
    return value;
  }

  std::string_view rest_;
  const std::string& path_;
  std::set<std::string_view> seen_;
  std::array<int64_t, 3> shape_{};
};

uint64_t little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

std::string shape_text(const std::array<int64_t, 3>& shape) {
  return str("[", shape[0], ", ", shape[1], ", ", shape[2], "]");
}

void check_size(const std::array<int64_t, 3>& shape, size_t payload, const std::string& path) {
  int64_t bytes = sizeof(int32_t);
  bool overflow = false;
  for (int64_t size : shape) overflow = overflow || __builtin_mul_overflow(bytes, size, &bytes);
  if (!overflow && static_cast<size_t>(bytes) == payload) return;
  throw ConfigError(str(path, ": shape ", shape_text(shape), " of int32 does not fit the ", payload,
                        " bytes that follow the header: the file is cut short or damaged"));
}

// ---- the feed

constexpr int64_t kMostSteps = std::numeric_limits<int64_t>::max() / 2;

class ReplayLane : public Lane {
 public:
  ReplayLane(std::shared_ptr<const ReplayFeed> feed, const LaneState& state)
      : feed_(std::move(feed)), state_(state) {}

  int64_t fill(Row row) override { return feed_->read(state_.position++, state_.lane, row); }
  LaneState state() const override { return state_; }

 private:
  std::shared_ptr<const ReplayFeed> feed_;
  LaneState state_;
};

std::filesystem::path file_in(const std::filesystem::path& folder, const char* name) {
  auto path = folder / name;
  if (!std::filesystem::exists(path))
    throw ConfigError(str("data set 'tokens': no ", path.string(),
                          "; training.dataset_path must be a folder with input.npy and labels.npy"));
  return path;
}

}  // namespace

NpyHeader parse_npy_header(std::string_view file, const std::string& path) {
  auto refuse = [&](const char* why) { throw ConfigError(str(path, ": not a readable .npy file: ", why)); };
  if (file.size() < 10 || !file.starts_with(kNpyMagic)) refuse("it doesn't begin with its magic bytes");
  int major = file[6];
  if (major < 1 || major > 3 || file[7] != 0) refuse("its version is not 1.0, 2.0 or 3.0");
  size_t length_bytes = major == 1 ? 2 : 4;
  size_t begin = 8 + length_bytes;
  if (file.size() < begin) refuse("it ends within the header");
  uint64_t length = little_endian(file.substr(8, length_bytes));
  if (length > file.size() - begin) refuse("it ends within the header");
  NpyHeader header{.data_start = begin + length};
  header.shape = HeaderReader(file.substr(begin, length), path).read_shape();
  check_size(header.shape, file.size() - header.data_start, path);
  return header;
}

NpyArray::NpyArray(const std::filesystem::path& path)
    : path_(path), file_(path), header_(parse_npy_header(file_.text(), path.string())) {}

void NpyArray::read_row(int64_t i, int64_t j, std::span<int64_t> row) const {
  size_t first = static_cast<size_t>(i * shape()[1] + j) * shape()[2];
  const char* at = file_.text().data() + header_.data_start + first * sizeof(int32_t);
  for (int64_t& value : row) {
    int32_t element;  // elements may be unaligned
    std::memcpy(&element, at, sizeof element);
    value = element;
    at += sizeof element;
  }
}

ReplayFeed::ReplayFeed(const std::filesystem::path& folder, int64_t vocab_size, bool finite)
    : input_(file_in(folder, "input.npy")),
      labels_(file_in(folder, "labels.npy")),
      vocab_size_(vocab_size),
      finite_(finite) {
  if (input_.shape() != labels_.shape())
    throw ConfigError(str(input_.path().string(), " has shape ", shape_text(input_.shape()),
                          " but labels.npy ", shape_text(labels_.shape())));
  fingerprint_ = str("tokens:", shape_text(input_.shape()), ":",
                     hex(hash_bytes(labels_.bytes(), hash_bytes(input_.bytes()))));
}

void ReplayFeed::check_shape(int64_t num_lanes, int64_t seq_len) const {
  if (num_lanes == input_.shape()[1] && seq_len == input_.shape()[2]) return;
  throw ConfigError(str("the recorded batches in ", input_.path().parent_path().string(),
                        " are [steps, global batch, sequence] = ", shape_text(input_.shape()),
                        ", but the config asks for a global batch of ", num_lanes, " sequences of ", seq_len,
                        " tokens: set training.global_batch_size and training.seq_len to the recording's"));
}

LaneState ReplayFeed::start(int64_t lane, int64_t) const { return {.lane = lane}; }

std::unique_ptr<Lane> ReplayFeed::open(const LaneState& state, int64_t) const {
  // A lane may be past the last step.
  TITAN_CHECK(state.lane >= 0 && state.lane < input_.shape()[1] && state.position >= 0 &&
                  state.position < kMostSteps && state.epoch == 0 && state.token_offset == 0,
              "the recorded batches in ", input_.path().parent_path().string(),
              " have no such position: row ", state.lane, " of ", input_.shape()[1], ", epoch ", state.epoch,
              ", step ", state.position, ", token ", state.token_offset);
  return std::make_unique<ReplayLane>(std::static_pointer_cast<const ReplayFeed>(shared_from_this()), state);
}

std::vector<LaneState> ReplayFeed::redeal(const std::vector<LaneState>& lanes, int64_t num_lanes) const {
  throw ConfigError(
      str("recorded batches of ", lanes.size(), " rows cannot be dealt as batches of ", num_lanes));
}

std::optional<int64_t> ReplayFeed::num_steps() const {
  return finite_ ? std::optional(input_.shape()[0]) : std::nullopt;
}

int64_t ReplayFeed::read(int64_t step, int64_t lane, Row row) const {
  if (step >= input_.shape()[0]) {
    TITAN_CHECK(finite_, "the recorded batches in ", input_.path().parent_path().string(), " end after ",
                input_.shape()[0], " steps; set training.steps to at most that");
    std::fill(row.input.begin(), row.input.end(), 0);
    std::fill(row.labels.begin(), row.labels.end(), kIgnoredLabel);
    return 0;
  }
  input_.read_row(step, lane, row.input);
  labels_.read_row(step, lane, row.labels);
  auto check = [&](int64_t id, const NpyArray& array) {
    TITAN_CHECK(id >= 0 && id < vocab_size_, array.path().string(), " has the id ", id, " at step ", step + 1,
                ", row ", lane + 1, ", outside the model's vocabulary of ", vocab_size_);
  };
  for (int64_t id : row.input) check(id, input_);
  for (int64_t id : row.labels)
    if (id != kIgnoredLabel) check(id, labels_);
  return static_cast<int64_t>(row.labels.size()) -
         std::count(row.labels.begin(), row.labels.end(), kIgnoredLabel);
}

}  // namespace titan::data
