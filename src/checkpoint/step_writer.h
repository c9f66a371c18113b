#pragma once

// [Note: a checkpoint comes to be], on the background thread of every rank: each writes its file into the
// pending folder and reports; rank 0, when all have, writes the manifest and gives the folder its name; all
// hear how it went. Whatever fails before the rename leaves no checkpoint, and what is behind it can't take
// it back. docs/checkpoint_protocol.md goes through who may fail where.

#include <string>
#include <vector>

#include "save_writer.h"

namespace titan::checkpoint::detail {

class StepWriter : public SaveWriter {
 public:
  using SaveWriter::SaveWriter;

  SaveOutcome write(const SaveJob& job) override;
  /// On rank 0.
  void prune(int64_t step) override;

 private:
  Verdict conclude(const SaveJob& job, const std::vector<Answer>& answers);
  void complete(const SaveJob& job, const std::vector<SaveReport>& reports);
};

}  // namespace titan::checkpoint::detail
