#pragma once

// DeviceMesh: the ranks of the world as a grid with named axes, row-major, the last axis fastest.
//
//   auto mesh = DeviceMesh::create(world, {{"dp_shard", -1}, {"tp", 4}});
//   auto tp_group = mesh["tp"].group();
//
// Axes of size 1 cost nothing: no group is made for them.

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "titan/dist/collectives.h"
#include "titan/dist/world.h"

namespace titan {

struct MeshAxis {
  std::string name;
  int size = 1;  ///< -1, for one axis of a mesh: the world's size divided by the other axes
};

/// A value handle (shared state). Equal meshes have the same ranks and axis names.
class DeviceMesh {
 public:
  DeviceMesh() = default;  ///< a mesh of one rank without axes
  /// Throws ConfigError when the sizes don't multiply to the world's size (naming sizes that would).
  static DeviceMesh create(const dist::World& world, std::vector<MeshAxis> axes);

  /// The sub-mesh of one or several axes that this rank is in: mesh["dp_shard"], mesh({"dp_replicate",
  /// "dp_shard"}).
  DeviceMesh operator[](std::string_view axis) const;
  DeviceMesh operator()(const std::vector<std::string>& axes) const;
  /// One axis of that name from several adjacent ones: flatten({"dp_shard", "cp"}, "fsdp"). Existing axes
  /// stay usable.
  DeviceMesh flatten(const std::vector<std::string>& axes, std::string name) const;

  /// The sub-mesh with this one's axes followed by `other`'s; both belong to the same mesh. A row-major
  /// position counts the axes in this order. Placements decide in which order the axes shard a tensor.
  DeviceMesh joined(const DeviceMesh& other) const;

  int num_axes() const;
  int size() const;  ///< ranks in this (sub-)mesh
  int size(std::string_view axis) const;
  bool has(std::string_view axis) const;
  int rank() const;                             ///< this rank's row-major position in the (sub-)mesh
  int coordinate(std::string_view axis) const;  ///< this rank's position on the axis
  const std::vector<MeshAxis>& axes() const;
  /// World ranks of this (sub-)mesh in row-major order.
  const std::vector<int>& ranks() const;

  /// The group over all ranks of this (sub-)mesh, made at the first call: all its ranks have to make that
  /// call, in the same order as those for their other groups.
  std::shared_ptr<dist::Group> group() const;
  /// The group along one axis; the same as (*this)[axis].group().
  std::shared_ptr<dist::Group> group(std::string_view axis) const;

  const dist::World& world() const;

  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b);

  struct Impl;

 private:
  explicit DeviceMesh(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  const Impl& own() const;
  std::shared_ptr<const Impl> impl_;  // null: the mesh of one rank without axes
};

}  // namespace titan
