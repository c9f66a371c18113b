// Reads the flight recorder's files. Every value is checked, because a dying process may have written half.

#include <algorithm>
#include <charconv>
#include <optional>

#include <nlohmann/json.hpp>

#include "core/file.h"
#include "guard/flight_report.h"
#include "titan/core/error.h"

namespace titan::dist {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 16;
constexpr uintmax_t kMostFileBytes = uintmax_t{1} << 30;
constexpr int kMostRanks = 1 << 24;

/// A value in a file, and its place there for error messages.
class Value {
 public:
  Value(const Json& json, std::string place) : json_(json), place_(std::move(place)) {}

  [[noreturn]] void refuse(const std::string& what) const { throw Error(place_ + " " + what); }
  Value at(const std::string& key, const Json& json) const {
    return {json, place_ + (place_.ends_with(": ") ? "" : ".") + key};
  }
  /// Nothing if the member is missing or null.
  std::optional<Value> find(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return std::nullopt;
    return at(key, *found);
  }
  Value need(const char* key) const {
    if (auto found = find(key)) return std::move(*found);
    at(key, json_).refuse("is missing");
  }

  bool is_table() const { return json_.is_object(); }
  const Json& table() const {
    if (!is_table()) refuse("isn't a table");
    return json_;
  }
  const Json& list() const {
    if (!json_.is_array()) refuse("isn't a list");
    return json_;
  }
  bool is_true() const { return json_.is_boolean() && json_.get<bool>(); }
  std::string text() const { return text(json_); }
  int64_t whole() const { return whole(json_); }
  int rank() const { return rank(json_); }

  // These read a value inside this one. Messages give this one's place.

  std::string text(const Json& value) const {
    if (value.is_string()) return value.get<std::string>();
    refuse("isn't a string");
  }
  // Times of day, counts, sizes: the difference of any two of them is representable, too.
  int64_t whole(const Json& value) const {
    constexpr int64_t most = int64_t{1} << 62;
    if (!value.is_number_integer()) refuse("isn't a whole number");
    const auto number = value.get<int64_t>();
    if (number < 0 || number > most) refuse(str("is ", value.dump(), ", not in 0..", most));
    return number;
  }
  /// A rank, or a number of ranks.
  int rank(const Json& value) const {
    const int64_t number = whole(value);
    if (number >= kMostRanks) refuse(str("is ", number, "; fewer than ", kMostRanks, " ranks are possible"));
    return static_cast<int>(number);
  }

  int64_t whole_or(const char* key, int64_t otherwise) const {
    const auto found = find(key);
    return found ? found->whole() : otherwise;
  }
  /// "" if the member is missing.
  std::string text_of(const char* key) const {
    const auto found = find(key);
    return found ? found->text() : "";
  }

  /// "[0, 1, 2]", or a list of numbers.
  std::vector<int> ranks() const {
    const Json parsed = json_.is_array() ? Json() : Json::parse(text(), nullptr, /*allow_exceptions=*/false);
    const Json& list = json_.is_array() ? json_ : parsed;
    if (!list.is_array()) refuse("isn't a list of ranks, such as \"[0, 1]\"");
    std::vector<int> ranks;
    for (const Json& each : list) ranks.push_back(rank(each));
    return ranks;
  }
  std::vector<std::vector<int64_t>> sizes() const {
    std::vector<std::vector<int64_t>> all;
    for (const Json& sizes : list()) {
      if (!sizes.is_array()) refuse("isn't a list");
      all.emplace_back();
      for (const Json& size : sizes) all.back().push_back(whole(size));
    }
    return all;
  }

 private:
  const Json& json_;
  std::string place_;
};

FlightState state_from(const Value& value) {
  static const std::map<std::string, FlightState> states = {{"scheduled", FlightState::Launched},
                                                            {"started", FlightState::Waiting},
                                                            {"completed", FlightState::Finished},
                                                            {"failed", FlightState::Failed}};
  const auto found = states.find(value.text());
  if (found == states.end())
    value.refuse(str("is '", value.text(), "'; known are scheduled, started, completed, failed"));
  return found->second;
}

/// Parses "titan:send 0->1": the operation, and the two ranks of a message.
void set_operation(FlightCall& call, const Value& value) {
  std::string name = value.text();
  if (const size_t colon = name.find(':'); colon != std::string::npos) name.erase(0, colon + 1);
  const size_t space = name.find(' ');
  call.op = name.substr(0, space);
  if (space == std::string::npos) return;
  const std::string pair = name.substr(space + 1);
  const size_t arrow = pair.find("->") != std::string::npos ? pair.find("->") : pair.find("<-");
  if (arrow == std::string::npos) return;
  int left = -1, right = -1;
  std::from_chars(pair.data(), pair.data() + arrow, left);
  std::from_chars(pair.data() + arrow + 2, pair.data() + pair.size(), right);
  if (left < 0 || right < 0) value.refuse(str("is '", name, "', which doesn't name two ranks"));
  const bool sends = pair[arrow] == '-';
  call.op = sends ? "send" : "receive";
  call.from = sends ? left : right;
  call.to = sends ? right : left;
}

class FlightReader {
 public:
  FlightReader(FlightFile& file, const Json& root)
      : file_(file), root_(root, str(file.path.string(), ": ")) {}

  void read() {
    if (!root_.is_table() || !root_.find("version"))
      root_.refuse("isn't a flight record: it has no member 'version'");
    if (const auto titan = root_.find("titan")) read_titan(*titan);
    if (const auto groups = root_.find("pg_config")) read_groups(*groups);
    if (const auto calls = root_.find("entries")) read_calls(*calls);
  }

 private:
  void read_titan(const Value& titan) {
    titan.table();
    file_.is_titan = true;
    file_.rank = titan.need("rank").rank();
    if (const auto size = titan.find("world_size")) file_.world_size = size->rank();
    file_.host = titan.text_of("host");
    file_.reason = titan.text_of("reason");
    file_.activity = titan.text_of("activity");
    file_.step = titan.whole_or("step", 0);
    file_.time_ns = titan.whole_or("time_ns", 0);
    file_.activity_since_ns = titan.whole_or("activity_since_ns", 0);
  }

  void read_groups(const Value& groups) {
    for (const auto& [name, json] : groups.table().items()) {
      const Value info = groups.at(name, json);
      info.table();
      FlightGroup group{info.text_of("desc"), info.text_of("purpose"), {}};
      if (group.name.empty() || group.name == "undefined") group.name = name;
      if (const auto ranks = info.find("ranks")) group.ranks = ranks->ranks();
      add_group(name, std::move(group));
    }
  }

  size_t add_group(const std::string& name, FlightGroup group) {
    file_.groups.push_back(std::move(group));
    return group_index_[name] = file_.groups.size() - 1;
  }

  size_t group_of(const Value& entry) {
    const Value process_group = entry.need("process_group");
    const Json& names = process_group.list();
    if (names.empty()) process_group.refuse("is empty");
    const std::string name = process_group.text(names[0]);
    const auto found = group_index_.find(name);
    if (found != group_index_.end()) return found->second;
    const std::string title = names.size() > 1 ? process_group.text(names[1]) : "";
    if (title.empty()) return add_group(name, {name, "", {}});
    return add_group(name, {title, "", title == "default_pg" ? ranks_of_nameless() : std::vector<int>()});
  }

  // PyTorch 2.11 lists a gloo job's default group without a name, but its calls under "0".
  std::vector<int> ranks_of_nameless() const {
    const auto nameless = group_index_.find("");
    return nameless != group_index_.end() ? file_.groups[nameless->second].ranks : std::vector<int>();
  }

  void read_calls(const Value& entries) {
    size_t index = 0;
    for (const Json& json : entries.list()) {
      const Value entry = root_.at(str("entries[", index++, "]"), json);
      entry.table();
      file_.calls.push_back(call_of(entry));
    }
    std::ranges::stable_sort(file_.calls, {}, &FlightCall::record);
    file_.is_whole = file_.calls.empty() || file_.calls.front().record == 0;
    if (file_.is_titan) return;
    count_pairs();
    for (const FlightCall& call : file_.calls)
      file_.time_ns = std::max({file_.time_ns, call.start_ns, call.end_ns});
  }

  FlightCall call_of(const Value& entry) {
    FlightCall call;
    call.record = entry.need("record_id").whole();
    call.group = group_of(entry);
    set_operation(call, entry.need("profiling_name"));
    call.sequence = entry.whole_or(call.is_pair() ? "p2p_seq_id" : "collective_seq_id", 0);
    if (const auto background = entry.find("background")) call.background = background->is_true();
    call.phase = entry.text_of("phase");
    call.module = entry.text_of("module");
    if (const auto sizes = entry.find("input_sizes")) call.in_sizes = sizes->sizes();
    if (const auto sizes = entry.find("output_sizes")) call.out_sizes = sizes->sizes();
    if (const auto dtypes = entry.find("input_dtypes"))
      for (const Json& dtype : dtypes->list()) call.dtypes.push_back(dtypes->text(dtype));
    call.start_ns = entry.whole_or("time_created_ns", 0);
    call.end_ns = entry.whole_or("time_discovered_completed_ns", 0);
    call.device_ns = entry.whole_or("device_ns", 0);
    call.state = state_from(entry.need("state"));
    // PyTorch leaves gloo's calls "scheduled", but marks those that are done as retired.
    const auto retired = entry.find("retired");
    if (!file_.is_titan && retired && retired->is_true() && call.state != FlightState::Failed)
      call.state = FlightState::Finished;
    return call;
  }

  // PyTorch numbers a group's sends and receives together, so the two sides of a message have different
  // numbers. Counting the messages from one rank to another gives a common number, if the file has the first
  // of them.
  void count_pairs() {
    std::map<std::tuple<size_t, std::string, int, int>, int64_t> next;
    if (!file_.is_whole) std::erase_if(file_.calls, [](const FlightCall& call) { return call.is_pair(); });
    for (FlightCall& call : file_.calls)
      if (call.is_pair()) call.sequence = next[{call.group, call.op, call.from, call.to}]++;
  }

  FlightFile& file_;
  const Value root_;
  std::map<std::string, size_t> group_index_;
};

std::optional<int> rank_in(const std::filesystem::path& path) {
  std::string name = path.filename().string();
  if (name.starts_with(".")) return std::nullopt;
  if (name.ends_with(".json")) name.resize(name.size() - 5);
  const size_t digits = name.size() - (name.find_last_not_of("0123456789") + 1);
  int rank = 0;
  const auto [end, error] =
      std::from_chars(name.data() + name.size() - digits, name.data() + name.size(), rank);
  if (digits == 0 || error != std::errc() || rank >= kMostRanks) return std::nullopt;
  return rank;
}

Json parse_record(const std::string& text, const std::filesystem::path& name) {
  // A pickle's first byte.
  if (text.starts_with("\x80"))
    throw Error(str(name.string(),
                    ": is a pickle, which isn't read because it can run any code. PyTorch writes JSON with "
                    "torch._C._distributed_c10d._dump_nccl_trace_json()"));
  try {
    return Json::parse(text, [&](int depth, Json::parse_event_t, Json&) {
      if (depth > kMaxDepth) throw Error(str(name.string(), ": is nested deeper than ", kMaxDepth));
      return true;
    });
  } catch (const Json::exception& error) {
    throw Error(str(name.string(), ": isn't JSON: ", error.what()));
  }
}

}  // namespace

FlightFile parse_flight_file(const std::string& text, const std::filesystem::path& name) {
  FlightFile file;
  file.path = name;
  const auto rank = rank_in(name);
  const Json record = parse_record(text, name);
  FlightReader(file, record).read();
  if (!file.is_titan && rank) file.rank = *rank;
  if (file.rank < 0)
    throw Error(str(name.string(), ": the record has no rank, and its name doesn't end in one"));
  return file;
}

FlightFile read_flight_file(const std::filesystem::path& path) {
  std::error_code none;
  const uintmax_t bytes = std::filesystem::file_size(path, none);
  if (!none && bytes > kMostFileBytes)
    throw Error(str(path.string(), ": has ", bytes, " bytes, more than the ", kMostFileBytes,
                    " of any flight record"));
  return parse_flight_file(read_file(path), path);
}

std::vector<FlightFile> read_flight_folder(const std::filesystem::path& folder,
                                           std::chrono::steady_clock::time_point end) {
  if (!std::filesystem::is_directory(folder)) throw Error(str(folder.string(), ": isn't a folder"));
  std::vector<FlightFile> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (!entry.is_regular_file() || !rank_in(entry.path())) continue;
    if (std::chrono::steady_clock::now() >= end)
      throw Error(
          str("the ranks' flight records take longer to read than there is time: see titan debug flight ",
              folder.string()));
    files.push_back(read_flight_file(entry.path()));
  }
  if (files.empty())
    throw Error(
        str(folder.string(), ": has no flight record; their names end in the rank, such as rank_0.json"));
  const int world_size = std::ranges::max_element(files, {}, &FlightFile::time_ns)->world_size;
  std::erase_if(files, [&](const FlightFile& file) { return file.world_size != world_size; });
  std::ranges::sort(files, {}, &FlightFile::rank);
  const auto two = std::ranges::adjacent_find(files, {}, &FlightFile::rank);
  if (two != files.end())
    throw Error(str(two->path.string(), " and ", std::next(two)->path.filename().string(),
                    " both belong to rank ", two->rank));
  return files;
}

}  // namespace titan::dist
