// The rank program of the peer checkpoint tests. HOSTS has a letter for each rank: ranks of one letter share
// FOLDER/host_LETTER, as ranks on a host share its memory.
//   peer_program FOLDER HOSTS save FIRST LAST       saves these steps, and waits until each is complete
//   peer_program FOLDER HOSTS fail PHASE HOW RANK   saves step 1; at PHASE of the save of step 2, RANK does
//                                                   HOW: throw, exit or hang
//   peer_program FOLDER HOSTS stall                 saves step 1; in the save of step 2, rank 1's copies
//                                                   stall until the save of step 3 was skipped because of
//                                                   them; then saves step 4. Prints the outcome of each
//   peer_program FOLDER HOSTS lose                  saves step 1; in the save of step 2, rank 1 never
//                                                   finishes writing. Prints the outcome of the next save
//   peer_program FOLDER HOSTS load                  prints "newest N" (or "none") and the damage; loads the
//                                                   step and checks it
//   peer_program FOLDER HOSTS end                   removes the folder, as when the job has ended
// A failure ends a rank with exit code 3. TITAN_TEST_JOB, TITAN_TEST_RUN and TITAN_TEST_OWNER set the
// folder's owner.

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <thread>

#include "checkpoint/peer/peer_folder.h"
#include "distributed/checkpoint_case.h"
#include "titan/checkpoint/step_folder.h"

namespace titan::testing {
namespace {

using checkpoint::Checkpointer;
using checkpoint::PeerFolder;
using checkpoint::SaveOptions;
using checkpoint::SavePhase;
using Words = std::vector<std::string>;

// The timeout of saves that succeed: only a stalled machine takes that long.
constexpr std::chrono::seconds kAmple(40);
// The timeout of saves in which ranks wait for another in vain.
constexpr std::chrono::seconds kShort(15);

std::string variable(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

std::shared_ptr<PeerFolder> open(const dist::World& world, const Words& words) {
  const char host = words.at(1).at(static_cast<size_t>(world.rank()));
  const auto parent = std::filesystem::path(words.at(0)) / titan::str("host_", host);
  std::error_code exists;
  std::filesystem::create_directory(parent, exists);
  return std::make_shared<PeerFolder>(world,
                                      PeerFolder::Options{.parent = parent,
                                                          .job = variable("TITAN_TEST_JOB", "job"),
                                                          .run = variable("TITAN_TEST_RUN", "run"),
                                                          .owner = variable("TITAN_TEST_OWNER", "here")});
}

/// The state of a job whose ranks are all along dp.
struct PeerJob {
  PeerJob(const dist::World& world, const Words& words, SaveOptions options = {.timeout = kAmple})
      : folder(open(world, words)), job(world), checkpointer(world, {}, with_peers(std::move(options))) {
    job.add_to(checkpointer);
  }

  SaveOptions with_peers(SaveOptions options) const {
    options.peers = folder;
    options.async = checkpoint::AsyncMode::Copied;
    return options;
  }

  void save(int64_t step) {
    job.fill(step);
    checkpointer.save(step);
    checkpointer.finish();
  }

  std::shared_ptr<PeerFolder> folder;
  ToyJob job;
  Checkpointer checkpointer;
};

void save_steps(const dist::World& world, const Words& words) {
  PeerJob peer(world, words);
  for (int64_t step = std::stoll(words.at(3)); step <= std::stoll(words.at(4)); ++step) peer.save(step);
}

void save_and_fail_at(const dist::World& world, const Words& words) {
  const bool chosen = world.rank() == std::stoi(words.at(5));
  bool armed = false;
  SaveOptions options;
  options.timeout = words.at(4) == "hang" ? kShort : kAmple;
  options.on_phase = [&](SavePhase at) {
    if (!armed || !chosen || to_string(at) != words.at(3)) return;
    if (words.at(4) == "exit") _exit(9);
    while (words.at(4) == "hang") pause();
    throw Error("told to throw");
  };
  PeerJob peer(world, words, options);
  peer.save(1);
  armed = true;
  peer.save(2);
  // Makes sure that the work after the verdict, removing the previous files, is done too.
  peer.save(3);
}

// Six pieces on each rank: enough that a rank can stop sending before the last one.
std::vector<TensorCase> large_tensors(int num_ranks) {
  return {{"large", {num_ranks, 2'650'000}, at::kLong, 0, -1, 0, -1}};
}

void stall_copies(const dist::World& world, const Words& words) {
  bool armed = false;
  std::atomic<bool> is_stalled = true;
  std::atomic<int> num_pieces = 0;
  SaveOptions options;
  options.timeout = kShort;
  options.stop_on_failure = false;
  options.on_phase = [&](SavePhase at) {
    if (!armed || world.rank() != 1 || at != SavePhase::CopyPiece) return;
    // The first call comes before the first piece.
    if (++num_pieces == 2)
      while (is_stalled) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  };
  const auto print = [&](const std::string& text) {
    if (world.rank() == 0) std::cout << text << std::endl;
  };
  PeerJob peer(world, words, options);
  ToyState large("large", peer.job.mesh, large_tensors(world.size()));
  peer.checkpointer.add("large", large);
  peer.save(1);
  armed = true;
  peer.save(2);
  print("step 2: " + peer.checkpointer.last_failure());
  print(titan::str("step 3: ", peer.checkpointer.save(3) ? "begun" : "skipped"));
  is_stalled = false;
  // Copies that are still in transit have to arrive first.
  while (!peer.checkpointer.save(4)) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  if (world.rank() == 1) std::cout << "pieces: " << num_pieces - 1 << std::endl;
  peer.checkpointer.finish();
  const checkpoint::SaveCounts counts = peer.checkpointer.counts();
  print(titan::str("step 4: ", peer.checkpointer.last_failure(), "; ", counts.complete, " complete, ",
                   counts.failed, " failed"));
}

void lose_rank(const dist::World& world, const Words& words) {
  bool armed = false;
  SaveOptions options;
  options.timeout = kShort;
  options.stop_on_failure = false;
  options.on_phase = [&](SavePhase at) {
    while (armed && world.rank() == 1 && at == SavePhase::WriteFile) pause();
  };
  PeerJob peer(world, words, options);
  peer.save(1);
  armed = true;
  try {
    peer.save(2);
  } catch (const Error& error) {
    TITAN_CHECK(world.rank() == 1, "a rank that waited for rank 1 failed: ", error.what());
  }
  const bool begun = peer.checkpointer.save(3);
  if (world.rank() == 0) std::cout << "step 3: " << (begun ? "begun" : "skipped") << std::endl;
}

void load_newest(const dist::World& world, const Words& words) {
  PeerJob peer(world, words);
  const auto newest = peer.folder->choose_newest();
  if (world.rank() == 0) std::cout << "newest " << (newest ? std::to_string(*newest) : "none") << std::endl;
  if (!newest) return;
  checkpoint::LoadOptions load;
  load.bring_files = [&](const checkpoint::Manifest& manifest, const std::set<int64_t>& ranks) {
    peer.folder->bring_files(manifest, ranks);
  };
  for (bool loaded = false; !loaded;) {
    try {
      peer.checkpointer.load(checkpoint::step_path(peer.folder->path(), *newest), load);
      loaded = true;
    } catch (const Error&) {
      const PeerFolder::Damage damage = peer.folder->remove_damaged();
      for (const std::string& found : damage.found)
        if (world.rank() == 0) std::cout << "damaged: " << found << std::endl;
      if (damage.found.empty() || !damage.is_whole) throw;
    }
  }
  peer.job.check(*newest);
  // Training can continue from there.
  peer.save(*newest + 1);
}

void act(const dist::World& world, const Words& words) {
  const std::string& what = words.at(2);
  if (what == "save") return save_steps(world, words);
  if (what == "fail") return save_and_fail_at(world, words);
  if (what == "stall") return stall_copies(world, words);
  if (what == "lose") return lose_rank(world, words);
  if (what == "load") return load_newest(world, words);
  if (what == "end") return PeerJob(world, words).folder->remove();
  throw Error("unknown word " + what);
}

}  // namespace
}  // namespace titan::testing

int main(int argc, char** argv) {
  titan::testing::run_rank(titan::testing::kAmple, [&](const auto& world) {
    titan::testing::act(world, {argv + 1, argv + argc});
  });
}
