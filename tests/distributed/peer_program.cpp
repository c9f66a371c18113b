// What the tests of peer checkpoints start as a rank. HOSTS has a letter for each rank: ranks of one letter
// share FOLDER/host_LETTER, as those of a host share its memory.
//   peer_program FOLDER HOSTS save FIRST LAST          these steps, each to its end
//   peer_program FOLDER HOSTS fail PHASE HOW RANK      step 1 is saved; in the save of step 2, RANK at PHASE
//                                                      does HOW: throw, exit or hang
//   peer_program FOLDER HOSTS load                     prints "newest N" (or "none"), loads it and checks it
//   peer_program FOLDER HOSTS end                      the job has come to its end
// A failure ends a rank with 3.

#include <unistd.h>

#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>

#include "distributed/checkpoint_case.h"
#include "titan/checkpoint/peer_folder.h"
#include "titan/checkpoint/step_folder.h"

namespace titan::testing {
namespace {

using checkpoint::Checkpointer;
using checkpoint::PeerFolder;
using checkpoint::SaveOptions;
using checkpoint::SavePhase;
using Words = std::vector<std::string>;

std::shared_ptr<PeerFolder> open(const dist::World& world, const Words& words) {
  const char host = words.at(1).at(static_cast<size_t>(world.rank()));
  const auto parent = std::filesystem::path(words.at(0)) / titan::str("host_", host);
  std::error_code exists;
  std::filesystem::create_directory(parent, exists);
  return std::make_shared<PeerFolder>(world,
                                      PeerFolder::Options{.parent = parent, .job = "job", .run = "run"});
}

/// The state as ranks cut it that are all along dp.
struct PeerJob {
  PeerJob(const dist::World& world, const Words& words, SaveOptions options = {})
      : folder(open(world, words)), job(world), checkpointer(world, {}, with_peers(std::move(options))) {
    job.add_to(checkpointer);
  }

  SaveOptions with_peers(SaveOptions options) const {
    options.peers = folder;
    options.async = checkpoint::AsyncMode::Copied;
    options.timeout = std::chrono::seconds(4);
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
  // What is left behind an answer: the removal of what was before.
  peer.save(3);
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
  peer.checkpointer.load(checkpoint::step_path(peer.folder->path(), *newest), load);
  peer.job.check(*newest);
  // Going on is possible from there.
  peer.save(*newest + 1);
}

void act(const dist::World& world, const Words& words) {
  const std::string& what = words.at(2);
  if (what == "save") return save_steps(world, words);
  if (what == "fail") return save_and_fail_at(world, words);
  if (what == "load") return load_newest(world, words);
  if (what == "end") return PeerJob(world, words).folder->remove();
  throw Error("unknown word " + what);
}

}  // namespace
}  // namespace titan::testing

int main(int argc, char** argv) {
  try {
    const auto world =
        titan::dist::init({.backend = "gloo", .device = "cpu", .timeout = std::chrono::seconds(30)});
    titan::testing::act(world, {argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::fflush(nullptr);
    _exit(3);
  }
  std::fflush(nullptr);
  _exit(0);
}
