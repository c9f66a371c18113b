#pragma once

// A backend without peers: one process plays one rank of any world, for dry runs, layouts and cost.
// Every call is done at once. What would come from the others is made of this rank's own data, so that values
// stay finite: gathered parts are copies of the own one, reductions return the own part. Meta tensors are
// accepted.

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
}

namespace titan::dist {

c10::intrusive_ptr<c10d::Backend> make_fake_group(int rank, int size);

}  // namespace titan::dist
