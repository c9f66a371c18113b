// Whether all ranks, on whatever hosts, mean the same folder by its path.

#include <algorithm>
#include <exception>
#include <random>
#include <thread>

#include "checkpoint/format/stored_files.h"
#include "checkpoint/save/checkpointer_impl.h"
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
  static void fields(auto& wire, auto& self) { wire(self.host, self.run_id, self.problem); }
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

// Returns rank 0's.
Greeting greet(dist::Group& group, const Greeting& own, OpenedFolder& opened) {
  Greeting first;
  for (const std::string& text : group.all_gather_text(to_wire(own), kOpenLabel)) {
    const auto greeting = from_wire<Greeting>(text);
    if (opened.hosts.empty()) first = greeting;
    opened.hosts.push_back(greeting.host);
  }
  opened.run_id = first.run_id;
  return first;
}

}  // namespace

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
      greet(group, is_root ? prepare(folder, opened) : Greeting{own_host(), "", ""}, opened).problem;
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
