#pragma once

// [Note: a generation comes to be], on the background thread of every rank:
//
//   write    its own file, into .step-N.RUN.tmp of its place
//   gather   rank 0 hears of all files, makes the manifest, and gives it to all
//   copy     the file goes to the next place, in pieces, while the one of the place before comes
//   agree    all have what they should
//   commit   each place's leader writes the manifest and gives the folder its name
//   agree    all places have it
//   prune    the leaders remove the generation before
//
// A place's generation gets its name when every file is at all places where it should be, and the one before
// goes when all places have given the name: whatever is lost in between, of one of the two all files are
// found that one lost place leaves.
//
// Copies that take too long end the generation and nothing else (peer_copies.h).

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
  std::string why_not() const override;

 private:
  Verdict manifest_or_failure(const SaveJob& job, const std::vector<Answer>& answers);
  /// Runs `part` and hears from all ranks how theirs went.
  Verdict on_all(const std::function<void()>& part);
  void copy_files(const Manifest& manifest);
  void commit(const Manifest& manifest);
  SaveOutcome give_up(int64_t step, const Verdict& verdict) const;

  std::unique_ptr<PeerCopies> copies_;  // null: there is one place
};

}  // namespace titan::checkpoint::detail
