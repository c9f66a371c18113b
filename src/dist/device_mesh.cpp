// [Note: meshes]
// A mesh is a grid of world ranks. Each axis has a size and, because ranks are laid out row-major, a stride.
// A sub-mesh keeps some axes (with their strides) and fixes this rank's coordinate on the others; flattening
// replaces adjacent axes by one whose coordinate counts them row-major. So the ranks of every (sub-)mesh are
// "base rank + sum of coordinate x stride".

#include "titan/dist/device_mesh.h"

#include <algorithm>
#include <limits>
#include <set>

#include "titan/core/error.h"

namespace titan {
namespace {

/// An axis of the layout: one pair per original axis it was flattened from, slowest first.
struct LayoutAxis {
  std::string name;
  std::vector<std::pair<int, int>> size_stride;

  int size() const {
    int product = 1;
    for (auto [size, stride] : size_stride) product *= size;
    return product;
  }
};

int position(const LayoutAxis& axis, int rank) {
  int coordinate = 0;
  for (auto [size, stride] : axis.size_stride) coordinate = coordinate * size + rank / stride % size;
  return coordinate;
}

std::string names_of(const std::vector<MeshAxis>& axes) {
  const auto form = [](const MeshAxis& axis) { return str(axis.name, "=", axis.size); };
  return axes.empty() ? "no axes" : list_str(axes, ", ", form);
}

}  // namespace

struct DeviceMesh::Impl {
  std::shared_ptr<const dist::World> world;  // null for the default mesh of one rank
  std::shared_ptr<const Impl> root;          // null in the root, which knows flattened axes, too
  std::vector<LayoutAxis> layout;
  std::vector<MeshAxis> axes;  // names and sizes of `layout`
  std::vector<int> ranks;
  int rank = 0;  // position in `ranks`

  mutable std::shared_ptr<dist::Group> group;  // made at the first call
  mutable std::vector<LayoutAxis> flattened;   // axes from flatten(), for mesh["fsdp"]; only in the root

  const LayoutAxis* find(std::string_view name) const {
    for (const auto* list : {&layout, &std::as_const(flattened)})
      for (const auto& axis : *list)
        if (axis.name == name) return &axis;
    return nullptr;
  }
  const Impl& top() const { return root ? *root : *this; }
};

namespace {

/// Whether all parts of `axis` are parts of the mesh.
bool is_within(const LayoutAxis& axis, const DeviceMesh::Impl& mesh) {
  return std::ranges::all_of(axis.size_stride, [&](const auto& part) {
    return std::ranges::any_of(mesh.layout, [&](const LayoutAxis& own) {
      return std::ranges::find(own.size_stride, part) != own.size_stride.end();
    });
  });
}

/// An axis of the mesh, or one flattened from its axes (the root remembers those). Null if there is none.
const LayoutAxis* find_axis_or_null(const DeviceMesh::Impl& mesh, std::string_view name) {
  if (const auto* axis = mesh.find(name)) return axis;
  const auto* axis = mesh.top().find(name);
  return axis && is_within(*axis, mesh) ? axis : nullptr;
}

const LayoutAxis& find_axis(const DeviceMesh::Impl& mesh, std::string_view name) {
  if (const auto* axis = find_axis_or_null(mesh, name)) return *axis;
  throw Error(str("the mesh (", names_of(mesh.axes), ") has no axis '", name, "'"));
}

/// All ranks that differ from `rank` only along `layout`, row-major, and rank's position among them.
void fill_ranks(DeviceMesh::Impl& mesh, int rank) {
  mesh.ranks = {rank};
  for (const auto& axis : mesh.layout)
    for (auto [size, stride] : axis.size_stride) {
      const int own_offset = rank / stride % size * stride;
      std::vector<int> next;
      for (int first : mesh.ranks)
        for (int i = 0; i < size; ++i) next.push_back(first - own_offset + i * stride);
      mesh.ranks = std::move(next);
    }
  mesh.rank = static_cast<int>(std::ranges::find(mesh.ranks, rank) - mesh.ranks.begin());
}

std::shared_ptr<DeviceMesh::Impl> make_mesh(std::shared_ptr<const dist::World> world,
                                            std::shared_ptr<const DeviceMesh::Impl> root,
                                            std::vector<LayoutAxis> layout) {
  auto impl = std::make_shared<DeviceMesh::Impl>();
  impl->world = std::move(world);
  impl->root = std::move(root);
  impl->layout = std::move(layout);
  for (const auto& axis : impl->layout) impl->axes.push_back({axis.name, axis.size()});
  fill_ranks(*impl, impl->world ? impl->world->rank() : 0);
  return impl;
}

/// Group ranks ascend with world ranks; so must the positions in a sub-mesh.
void check_order(const std::vector<LayoutAxis>& layout, const DeviceMesh::Impl& mesh) {
  int last_stride = std::numeric_limits<int>::max();
  for (const auto& axis : layout) {
    for (auto [size, stride] : axis.size_stride) {
      if (size == 1) continue;  // its stride equals its neighbor's
      TITAN_CHECK(stride < last_stride, "axes of a sub-mesh have to keep the order of the mesh (",
                  names_of(mesh.axes), ") and not overlap; '", axis.name, "' comes too late or twice");
      last_stride = stride;
    }
  }
}

std::string divisors(int number) {
  std::string text;
  for (int i = 1; i <= number; ++i)
    if (number % i == 0) text += str(text.empty() ? "" : ", ", i);
  return text;
}

void check_axes(const std::vector<MeshAxis>& axes) {
  std::vector<std::string> problems;
  std::set<std::string> names;
  int unknown = 0;
  for (const auto& axis : axes) {
    if (!names.insert(axis.name).second) problems.push_back(str("mesh axis '", axis.name, "' appears twice"));
    if (axis.size < 1 && axis.size != -1) {
      problems.push_back(
          str("mesh axis '", axis.name, "' has size ", axis.size, "; allowed: 1 and above, or -1"));
    }
    unknown += axis.size == -1;
  }
  if (unknown > 1) problems.push_back(str("only one mesh axis can be -1: ", names_of(axes)));
  if (!problems.empty()) throw ConfigError(problems);
}

void resolve_sizes(std::vector<MeshAxis>& axes, int world_size) {
  check_axes(axes);
  int64_t known = 1;
  MeshAxis* unknown = nullptr;
  for (auto& axis : axes)
    if (axis.size == -1)
      unknown = &axis;
    else
      known *= axis.size;
  if (unknown && world_size % known == 0) {
    unknown->size = static_cast<int>(world_size / known);
  } else if (unknown || known != world_size) {
    throw ConfigError(str("the mesh (", names_of(axes), ") doesn't make ", world_size,
                          " ranks: its sizes give ", known, ", which has to ", unknown ? "divide" : "be",
                          " the world size (divisors: ", divisors(world_size), ")"));
  }
}

}  // namespace

const DeviceMesh::Impl& DeviceMesh::own() const {
  static const auto default_mesh = make_mesh(nullptr, nullptr, {});
  return impl_ ? *impl_ : *default_mesh;
}

DeviceMesh DeviceMesh::create(const dist::World& world, std::vector<MeshAxis> axes) {
  resolve_sizes(axes, world.size());
  std::vector<LayoutAxis> layout(axes.size());
  int stride = 1;
  for (size_t i = axes.size(); i-- > 0; stride *= axes[i].size)
    layout[i] = {axes[i].name, {{axes[i].size, stride}}};
  return DeviceMesh(make_mesh(std::make_shared<dist::World>(world), nullptr, std::move(layout)));
}

DeviceMesh DeviceMesh::operator[](std::string_view axis) const { return (*this)({std::string(axis)}); }

DeviceMesh DeviceMesh::operator()(const std::vector<std::string>& axes) const {
  std::vector<LayoutAxis> layout;
  for (const auto& name : axes) layout.push_back(find_axis(own(), name));
  check_order(layout, own());
  return DeviceMesh(make_mesh(own().world, own().root ? own().root : impl_, std::move(layout)));
}

DeviceMesh DeviceMesh::flatten(const std::vector<std::string>& axes, std::string name) const {
  LayoutAxis flat{std::move(name), {}};
  for (const auto& axis : axes) {
    const auto& parts = find_axis(own(), axis).size_stride;
    flat.size_stride.insert(flat.size_stride.end(), parts.begin(), parts.end());
  }
  const Impl& top = own().top();
  if (const auto* known = top.find(flat.name)) {
    TITAN_CHECK(known->size_stride == flat.size_stride, "the mesh (", names_of(top.axes), ") has an axis '",
                flat.name, "' with other ranks");
  } else {
    top.flattened.push_back(flat);
  }
  return (*this)[flat.name];
}

DeviceMesh DeviceMesh::joined(const DeviceMesh& other) const {
  if (!impl_ || impl_->axes.empty()) return other;
  if (!other.impl_) return *this;
  TITAN_CHECK(&impl_->top() == &other.impl_->top(), "meshes of different roots (", names_of(axes()), " and ",
              names_of(other.axes()), ") can't be joined");
  std::vector<LayoutAxis> layout = impl_->layout;
  layout.insert(layout.end(), other.impl_->layout.begin(), other.impl_->layout.end());
  check_order(layout, impl_->top());
  return DeviceMesh(make_mesh(impl_->world, impl_->root ? impl_->root : impl_, std::move(layout)));
}

int DeviceMesh::num_axes() const { return static_cast<int>(axes().size()); }
int DeviceMesh::size() const { return static_cast<int>(ranks().size()); }
int DeviceMesh::rank() const { return own().rank; }

int DeviceMesh::size(std::string_view axis) const { return find_axis(own(), axis).size(); }
bool DeviceMesh::has(std::string_view axis) const { return find_axis_or_null(own(), axis) != nullptr; }
int DeviceMesh::coordinate(std::string_view axis) const {
  return position(find_axis(own(), axis), own().world ? own().world->rank() : 0);
}
const std::vector<MeshAxis>& DeviceMesh::axes() const { return own().axes; }
const std::vector<int>& DeviceMesh::ranks() const { return own().ranks; }

const dist::World& DeviceMesh::world() const {
  TITAN_CHECK(impl_ && impl_->world, "a default DeviceMesh has no world; make it with DeviceMesh::create");
  return *impl_->world;
}

std::shared_ptr<dist::Group> DeviceMesh::group() const {
  auto& group = own().group;
  if (group) return group;
  // "dp_shard", or "dp_replicate x dp_shard"
  const auto name_of = [](const MeshAxis& axis) { return axis.name; };
  const std::string name = axes().empty() ? "self" : list_str(axes(), " x ", name_of);
  group = size() == 1 ? dist::Group::alone(name, ranks()[0]) : own().world->group(ranks(), name);
  return group;
}

std::shared_ptr<dist::Group> DeviceMesh::group(std::string_view axis) const { return (*this)[axis].group(); }

bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
  const auto same = [](const MeshAxis& x, const MeshAxis& y) { return x.name == y.name && x.size == y.size; };
  return a.ranks() == b.ranks() && std::ranges::equal(a.axes(), b.axes(), same);
}

}  // namespace titan
