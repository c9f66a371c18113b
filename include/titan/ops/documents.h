#pragma once

// The documents that are packed into the rows of a batch, for attention that stays within them.
//
//   const auto documents = ops::documents_ending_with(eos_id, tokens_BS);  // on the host
//   at::Tensor out = ops::causal_attention(q, k, v, documents);

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace titan::ops {

/// Where the documents of a batch [B, S] start, if its rows are laid end to end. A document lies in one row.
struct Documents {
  at::Tensor starts;    ///< int32 [N + 1], ascending, from 0 to B * S; undefined: each row is one document
  int64_t longest = 0;  ///< the most tokens of a document

  explicit operator bool() const { return starts.defined(); }
  /// The same with `starts` on `device`, where a kernel reads them. From page-locked memory the copy is asynchronous.
  Documents to(at::Device device) const {
    return {starts.to(device, starts.scalar_type(), /*non_blocking=*/true), longest};
  }
};

/// The documents of `tokens`, int64 [B, S] on the host and contiguous. A token `end` is the last of its document; a
/// row's first and last document may be parts of longer ones. This is TorchTitan's rule (get_document_mask_mod,
/// create_varlen_metadata_for_document). `pinned`: page-locked memory, for a copy to a GPU.
Documents documents_ending_with(int64_t end, const at::Tensor& tokens_BS, bool pinned = false);

}  // namespace titan::ops
