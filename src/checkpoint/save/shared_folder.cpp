#include "checkpoint/save/shared_folder.h"

#include <algorithm>
#include <exception>
#include <random>
#include <thread>

#include "checkpoint/format/stored_files.h"
#include "checkpoint/save/rank_tree.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

namespace fs = std::filesystem;

constexpr dist::Label kOpenLabel{.phase = "checkpoint::open_folder"};
constexpr const char* kProbeName = ".probe";
// A network file system may show a new file later elsewhere: NFS caches a folder's contents this long.
constexpr std::chrono::milliseconds kLongestDelay(60'000);

struct Greeting {
  std::string host, run_id, problem;  // the last two are rank 0's
};

bool has_probe(const fs::path& folder, const std::string& run_id) {
  try {
    return read_text(folder / kProbeName) == run_id;
  } catch (const Error&) {
    return false;
  }
}

std::string problem_of(const fs::path& folder, const std::string& run_id, std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + std::min(kLongestDelay, timeout / 2);
  while (!has_probe(folder, run_id)) {
    if (std::chrono::steady_clock::now() > end)
      return titan::str("doesn't see in ", folder.string(), " what rank 0 wrote there");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const std::string problem = storage_of(folder).write_problem(folder);
  return problem.empty() ? "" : titan::str("can't write to ", folder.string(), ": ", problem);
}

// Left by runs that were killed just then; earlier versions had temporary names for it, too.
void remove_probes(const fs::path& folder) {
  for (const std::string& name : storage_of(folder).list(folder)) {
    const bool half_written = name.starts_with(titan::str(".", kProbeName, ".")) && name.ends_with(".tmp");
    if (name == kProbeName || half_written) remove_quietly(folder / name);
  }
}

// Rank 0's part, before the others look.
Greeting prepare(const fs::path& folder, OpenedFolder& opened) {
  Greeting greeting{own_host(), random_id(), ""};
  try {
    opened.lock.emplace(folder);
    clean_leftovers(folder, *opened.lock);
    if (opened.lock->held()) remove_probes(folder);
    write_text(folder / kProbeName, greeting.run_id);
  } catch (const std::exception& error) {
    greeting.problem = error.what();
  }
  return greeting;
}

// Returns rank 0's problem.
std::string greet(dist::Group& group, const Greeting& own, OpenedFolder& opened) {
  WireWriter out;
  out(own.host, own.run_id, own.problem);
  std::vector<Greeting> greetings;
  for (const std::string& text : group.all_gather_text(out.take(), kOpenLabel)) {
    Greeting& greeting = greetings.emplace_back();
    WireReader{text}(greeting.host, greeting.run_id, greeting.problem);
    opened.hosts.push_back(greeting.host);
  }
  opened.run_id = greetings[0].run_id;
  return greetings[0].problem;
}

}  // namespace

std::string rank_on(size_t rank, const std::string& host) {
  return titan::str("rank ", rank, " (", host, ")");
}

std::string random_id() {
  constexpr const char* digits = "0123456789abcdef";
  std::random_device source;
  std::string id;
  while (id.size() < 32) id += digits[source() % 16];
  return id;
}

OpenedFolder open_to_read(dist::Group& group) {
  OpenedFolder opened;
  greet(group, {own_host(), random_id(), ""}, opened);
  return opened;
}

OpenedFolder open_shared_folder(dist::Group& group, const fs::path& folder,
                                std::chrono::milliseconds timeout) {
  OpenedFolder opened;
  const bool is_root = group.rank() == 0;
  const std::string problem =
      greet(group, is_root ? prepare(folder, opened) : Greeting{own_host(), "", ""}, opened);
  if (!problem.empty())
    throw Error(titan::str("checkpoints can't be saved: ", rank_on(0, opened.hosts[0]), ": ", problem));
  const auto problems = group.all_gather_text(problem_of(folder, opened.run_id, timeout), kOpenLabel);
  if (is_root) remove_quietly(folder / kProbeName);
  std::string all;
  for (size_t rank = 0; rank < problems.size(); ++rank)
    if (!problems[rank].empty())
      all += titan::str(all.empty() ? "" : "; ", rank_on(rank, opened.hosts[rank]), " ", problems[rank]);
  if (!all.empty())
    throw Error("the folder of the checkpoints has to be one that all ranks share and can write to: " + all);
  return opened;
}

}  // namespace titan::checkpoint::detail
