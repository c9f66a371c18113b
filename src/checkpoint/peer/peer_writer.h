#pragma once

// [Note: writing a generation], on the background thread of every rank:
//
//   write    its own file, into .step-N.RUN.tmp of its place
//   gather   rank 0 learns of all files, makes the manifest, and sends it to all
//   copy     the file is sent to the next place, in pieces, while the previous place's arrives
//   agree    all have what they should
//   commit   each place's leader writes the manifest and renames the folder
//   agree    all places have it
//   prune    the leaders remove the previous generation
//
// A place's folder is renamed when every file is at all places where it should be, and the previous
// generation is removed when all places have renamed theirs: whatever is lost in between, all files of one of
// the two survive the loss of any one place.
//
// Copies that take too long end the generation and nothing else (transfer.h).

#include <functional>
#include <memory>

#include "checkpoint/peer/peer_folder.h"
#include "checkpoint/peer/transfer.h"
#include "checkpoint/save/save_writer.h"

namespace titan::checkpoint::detail {

class PeerWriter : public SaveWriter {
 public:
  /// `copies`: a group for them alone; null where there is one place.
  PeerWriter(SaveOptions options, std::string run_id, RankTree tree, std::shared_ptr<dist::Group> copies);
  SaveOutcome write(const SaveJob& job) override;
  void prune(int64_t step) override;
  std::string busy_reason() const override;

 private:
  Verdict manifest_or_failure(const SaveJob& job, const std::vector<Answer>& answers) const;
  /// Runs `part`; all ranks' problems together.
  Verdict on_all(const std::function<void()>& part);
  void copy_files(const Manifest& manifest);
  void commit(const Manifest& manifest);
  SaveOutcome give_up(int64_t step, const Verdict& verdict) const;

  std::unique_ptr<PeerCopies> copies_;  // null: there is one place
};

}  // namespace titan::checkpoint::detail
