#pragma once

#include <memory>
#include <vector>

namespace torch {
class Library;
}

namespace titan::ops {

/// While an object lives, all of LibTitan's operators run as composites of LibTorch's operations, on CPUs and GPUs and in
/// the whole process, also those of Float8. To find out whether a kernel is at fault. Objects must be destroyed in the
/// reverse order of their construction.
class ReferenceKernels {
 public:
  ReferenceKernels();
  ~ReferenceKernels();
  ReferenceKernels(const ReferenceKernels&) = delete;
  ReferenceKernels& operator=(const ReferenceKernels&) = delete;

  /// Whether an object lives.
  static bool in_use();

 private:
  std::vector<std::unique_ptr<torch::Library>> registrations_;
};

}  // namespace titan::ops
