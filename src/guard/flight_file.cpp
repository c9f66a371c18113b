#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>

#include <nlohmann/json.hpp>

#include "guard/flight_report.h"
#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan::dist {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 16;
constexpr uintmax_t kMostFileBytes = uintmax_t{1} << 30;
constexpr int kMostRanks = 1 << 24;

/// A place in a file, for error messages.
struct Place {
  std::string text;
  Place at(const std::string& key) const { return {text + (text.ends_with(": ") ? "" : ".") + key}; }
  [[noreturn]] void refuse(const std::string& what) const { throw Error(text + " " + what); }
};

const Json* find_member(const Json& table, const char* key) {
  const auto found = table.find(key);
  return found == table.end() || found->is_null() ? nullptr : &*found;
}

const Json& member(const Json& table, const char* key, const Place& place) {
  const Json* found = find_member(table, key);
  if (!found) place.at(key).refuse("isn't there");
  return *found;
}

// Times of day, counts, sizes: the difference of any two of them is representable, too.
int64_t whole(const Json& value, const Place& place) {
  constexpr int64_t most = int64_t{1} << 62;
  if (!value.is_number_integer()) place.refuse("isn't a whole number");
  const auto number = value.get<int64_t>();
  if (number < 0 || number > most) place.refuse(str("is ", value.dump(), ", not in 0..", most));
  return number;
}

int small_whole(const Json& value, const Place& place) {
  const int64_t number = whole(value, place);
  if (number >= kMostRanks)
    place.refuse(str("is ", number, "; fewer than ", kMostRanks, " ranks are possible"));
  return static_cast<int>(number);
}

int64_t whole_or(const Json& table, const char* key, int64_t otherwise, const Place& place) {
  const Json* found = find_member(table, key);
  return found ? whole(*found, place.at(key)) : otherwise;
}

std::string text_of(const Json& value, const Place& place) {
  if (value.is_string()) return value.get<std::string>();
  place.refuse("isn't a text");
}

std::string text_or(const Json& table, const char* key, const Place& place) {
  const Json* found = find_member(table, key);
  return found ? text_of(*found, place.at(key)) : "";
}

const Json& list_of(const Json& value, const Place& place) {
  if (value.is_array()) return value;
  place.refuse("isn't a list");
}

/// "[0, 1, 2]", or a list of numbers.
std::vector<int> ranks_of(const Json& value, const Place& place) {
  std::vector<int> ranks;
  if (value.is_array()) {
    for (const Json& rank : value) ranks.push_back(small_whole(rank, place));
    return ranks;
  }
  const Json ranks_list = Json::parse(text_of(value, place), nullptr, /*allow_exceptions=*/false);
  if (!ranks_list.is_array()) place.refuse("isn't a list of ranks, as \"[0, 1]\"");
  for (const Json& rank : ranks_list) ranks.push_back(small_whole(rank, place));
  return ranks;
}

std::vector<std::vector<int64_t>> sizes_of(const Json& value, const Place& place) {
  std::vector<std::vector<int64_t>> all;
  for (const Json& sizes : list_of(value, place)) {
    all.emplace_back();
    for (const Json& size : list_of(sizes, place)) all.back().push_back(whole(size, place));
  }
  return all;
}

FlightState state_from(const std::string& name, const Place& place) {
  static const std::map<std::string, FlightState> states = {{"scheduled", FlightState::Launched},
                                                            {"started", FlightState::Waiting},
                                                            {"completed", FlightState::Finished},
                                                            {"failed", FlightState::Failed}};
  const auto found = states.find(name);
  if (found == states.end())
    place.refuse(str("is '", name, "'; known are scheduled, started, completed, failed"));
  return found->second;
}

/// "titan:send 0->1": what it does, and between whom.
void set_operation(FlightCall& call, std::string name, const Place& place) {
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
  if (left < 0 || right < 0) place.refuse(str("is '", name, "', which names no two ranks"));
  const bool sends = pair[arrow] == '-';
  call.op = sends ? "send" : "receive";
  call.from = sends ? left : right;
  call.to = sends ? right : left;
}

class FlightReader {
 public:
  FlightReader(FlightFile& file, const Json& root)
      : file_(file), root_(root), place_{str(file.path.string(), ": ")} {}

  void read() {
    if (!root_.is_object() || !find_member(root_, "version"))
      place_.refuse("isn't a flight record: it has no member 'version'");
    read_titan();
    if (const Json* groups = find_member(root_, "pg_config")) read_groups(*groups);
    if (const Json* calls = find_member(root_, "entries")) read_calls(*calls);
  }

 private:
  void read_titan() {
    const Json* titan = find_member(root_, "titan");
    if (!titan) return;
    const Place place = place_.at("titan");
    if (!titan->is_object()) place.refuse("isn't a table");
    file_.is_titan = true;
    file_.rank = small_whole(member(*titan, "rank", place), place.at("rank"));
    if (const Json* size = find_member(*titan, "world_size"))
      file_.world_size = small_whole(*size, place.at("world_size"));
    file_.host = text_or(*titan, "host", place);
    file_.reason = text_or(*titan, "reason", place);
    file_.activity = text_or(*titan, "activity", place);
    file_.step = whole_or(*titan, "step", 0, place);
    file_.time_ns = whole_or(*titan, "time_ns", 0, place);
    file_.activity_since_ns = whole_or(*titan, "activity_since_ns", 0, place);
  }

  void read_groups(const Json& groups) {
    const Place place = place_.at("pg_config");
    if (!groups.is_object()) place.refuse("isn't a table");
    for (const auto& [name, info] : groups.items()) {
      const Place here = place.at(name);
      if (!info.is_object()) here.refuse("isn't a table");
      FlightGroup group{text_or(info, "desc", here), text_or(info, "purpose", here), {}};
      if (group.name.empty() || group.name == "undefined") group.name = name;
      if (const Json* ranks = find_member(info, "ranks")) group.ranks = ranks_of(*ranks, here.at("ranks"));
      add_group(name, std::move(group));
    }
  }

  size_t add_group(const std::string& name, FlightGroup group) {
    file_.groups.push_back(std::move(group));
    return group_index_[name] = file_.groups.size() - 1;
  }

  size_t group_of(const Json& entry, const Place& place) {
    const Json& names = list_of(member(entry, "process_group", place), place.at("process_group"));
    if (names.empty()) place.at("process_group").refuse("is empty");
    const std::string name = text_of(names[0], place.at("process_group"));
    const auto found = group_index_.find(name);
    if (found != group_index_.end()) return found->second;
    const std::string title = names.size() > 1 ? text_of(names[1], place.at("process_group")) : "";
    if (title.empty()) return add_group(name, {name, "", {}});
    return add_group(name, {title, "", title == "default_pg" ? ranks_of_nameless() : std::vector<int>()});
  }

  // PyTorch 2.11 lists a gloo job's default group without a name, but its calls under "0".
  std::vector<int> ranks_of_nameless() const {
    const auto nameless = group_index_.find("");
    return nameless != group_index_.end() ? file_.groups[nameless->second].ranks : std::vector<int>();
  }

  void read_calls(const Json& entries) {
    size_t index = 0;
    for (const Json& entry : list_of(entries, place_.at("entries"))) {
      const Place place = place_.at(str("entries[", index++, "]"));
      if (!entry.is_object()) place.refuse("isn't a table");
      file_.calls.push_back(call_of(entry, place));
    }
    std::stable_sort(file_.calls.begin(), file_.calls.end(),
                     [](const FlightCall& a, const FlightCall& b) { return a.record < b.record; });
    file_.is_whole = file_.calls.empty() || file_.calls.front().record == 0;
    if (!file_.is_titan) count_pairs();
    for (const FlightCall& call : file_.calls)
      file_.time_ns = file_.is_titan ? file_.time_ns : std::max({file_.time_ns, call.start_ns, call.end_ns});
  }

  FlightCall call_of(const Json& entry, const Place& place) {
    FlightCall call;
    call.record = whole(member(entry, "record_id", place), place.at("record_id"));
    call.group = group_of(entry, place);
    set_operation(call, text_of(member(entry, "profiling_name", place), place.at("profiling_name")),
                  place.at("profiling_name"));
    call.sequence = whole_or(entry, call.is_pair() ? "p2p_seq_id" : "collective_seq_id", 0, place);
    if (const Json* background = find_member(entry, "background"))
      call.background = background->is_boolean() && background->get<bool>();
    call.phase = text_or(entry, "phase", place);
    call.module = text_or(entry, "module", place);
    if (const Json* sizes = find_member(entry, "input_sizes"))
      call.in_sizes = sizes_of(*sizes, place.at("input_sizes"));
    if (const Json* sizes = find_member(entry, "output_sizes"))
      call.out_sizes = sizes_of(*sizes, place.at("output_sizes"));
    if (const Json* dtypes = find_member(entry, "input_dtypes"))
      for (const Json& dtype : list_of(*dtypes, place.at("input_dtypes")))
        call.dtypes.push_back(text_of(dtype, place.at("input_dtypes")));
    call.start_ns = whole_or(entry, "time_created_ns", 0, place);
    call.end_ns = whole_or(entry, "time_discovered_completed_ns", 0, place);
    call.state = state_from(text_of(member(entry, "state", place), place.at("state")), place.at("state"));
    // PyTorch leaves gloo's calls "scheduled", but marks those that are done as retired.
    const Json* retired = find_member(entry, "retired");
    const bool is_retired = retired && retired->is_boolean() && retired->get<bool>();
    if (!file_.is_titan && is_retired && call.state != FlightState::Failed)
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
  const Json& root_;
  Place place_;
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

Json parse_json(const std::string& text, const std::filesystem::path& name) {
  // The first byte of a pickle.
  if (text.starts_with("\x80"))
    throw Error(str(name.string(),
                    ": is a pickle, which isn't read: it can run any code. PyTorch writes JSON by "
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
  FlightReader(file, parse_json(text, name)).read();
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
    throw Error(str(folder.string(), ": has no flight record; their names end in the rank, as rank_0.json"));
  const auto newest =
      std::max_element(files.begin(), files.end(),
                       [](const FlightFile& a, const FlightFile& b) { return a.time_ns < b.time_ns; });
  const int world_size = newest->world_size;
  std::erase_if(files, [&](const FlightFile& file) { return file.world_size != world_size; });
  std::sort(files.begin(), files.end(),
            [](const FlightFile& a, const FlightFile& b) { return a.rank < b.rank; });
  for (size_t i = 1; i < files.size(); ++i)
    if (files[i].rank == files[i - 1].rank)
      throw Error(str(files[i - 1].path.string(), " and ", files[i].path.filename().string(),
                      " are both of rank ", files[i].rank));
  return files;
}

}  // namespace titan::dist
