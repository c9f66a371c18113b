#include <algorithm>
#include <cmath>

#include "titan/config/table.h"
#include "titan/core/error.h"

namespace titan::config {
namespace {

/// A number as people write it in a sentence: "1", not "1.0".
std::string number(double value) { return str(value); }

Constraint numeric(std::string allowed, std::function<bool(double)> accepts) {
  auto check = [accepts = std::move(accepts)](const Value& value) {
    if (const auto* integer = std::get_if<int64_t>(&value)) return accepts(static_cast<double>(*integer));
    const auto* real = std::get_if<double>(&value);
    return real != nullptr && accepts(*real);
  };
  return {std::move(allowed), std::move(check), {}};
}

}  // namespace

Constraint one_of(std::vector<std::string> names) {
  std::string listed;
  for (const auto& name : names) listed += (listed.empty() ? "" : ", ") + config::quoted(name);
  auto known = [names](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  auto accepts = [known](const Value& value) {
    if (const auto* list = std::get_if<StringList>(&value))
      return std::all_of(list->begin(), list->end(), known);
    const auto* name = std::get_if<std::string>(&value);
    return name != nullptr && known(*name);
  };
  return {"one of " + listed, accepts, names};
}

Constraint at_least(double lowest) {
  return numeric("at least " + number(lowest), [=](double value) { return value >= lowest; });
}

Constraint finite_at_least(double lowest) {
  return numeric(str("finite and at least ", number(lowest)),
                 [=](double value) { return std::isfinite(value) && value >= lowest; });
}

Constraint above(double bound) {
  return numeric("above " + number(bound), [=](double value) { return value > bound; });
}

Constraint in_range(double lowest, double highest) {
  return numeric(str("from ", number(lowest), " to ", number(highest)),
                 [=](double value) { return value >= lowest && value <= highest; });
}

Constraint in_range_below(double lowest, double bound) {
  return numeric(str("from ", number(lowest), " to below ", number(bound)),
                 [=](double value) { return value >= lowest && value < bound; });
}

Constraint positive_or_minus_one() {
  return numeric("positive, or -1", [](double value) { return value >= 1 || value == -1; });
}

}  // namespace titan::config
