#include "agreement.h"

#include <algorithm>
#include <set>

#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

constexpr size_t kShownProblems = 8;

}  // namespace

Verdict merged_problems(const RankTree& tree, const std::vector<Answer>& answers) {
  std::vector<std::string> shown;
  std::set<std::string> known;
  Verdict verdict;
  size_t num_problems = 0;
  const bool all_alike = std::all_of(answers.begin(), answers.end(), [&](const Answer& answer) {
    return !answer.lost && answer.text == answers[0].text;
  });
  if (all_alike) return {answers[0].text, false};
  for (const Answer& answer : answers) {
    verdict.lost = verdict.lost || answer.lost;
    // What several say alike is said once.
    if (answer.text.empty() || (!answer.lost && !known.insert(answer.text).second)) continue;
    if (++num_problems <= kShownProblems)
      shown.push_back(titan::str(tree.name_of(answer.rank), answer.lost ? " " : ": ", answer.text));
  }
  for (const std::string& problem : shown) verdict.text += (verdict.text.empty() ? "" : "; ") + problem;
  if (num_problems > shown.size())
    verdict.text += titan::str("; and ", num_problems - shown.size(), " more ranks");
  return verdict;
}

Verdict unequal(const RankTree& tree, const std::vector<Answer>& answers, const std::string& what) {
  if (tree.rank() != 0) return {};
  for (const Answer& answer : answers) {
    if (answer.lost) return {titan::str(tree.name_of(answer.rank), " ", answer.text), true};
    if (answer.text != answers[0].text)
      return {titan::str(tree.name_of(answer.rank), " ", what, " ", tree.name_of(0)), false};
  }
  return {};
}

Verdict agree(RankTree& tree, const std::string& problem) {
  const auto answers = tree.gather(problem);
  return tree.spread(tree.rank() == 0 ? merged_problems(tree, answers) : Verdict{});
}

std::string any_text(RankTree& tree, const std::string& text) {
  Verdict verdict;
  for (const Answer& answer : tree.gather(text)) {
    if (answer.lost) verdict = {titan::str(tree.name_of(answer.rank), " ", answer.text), true};
    if (verdict.text.empty()) verdict.text = answer.text;
  }
  verdict = tree.spread(verdict);
  TITAN_CHECK(!verdict.lost, verdict.text);
  return verdict.text;
}

}  // namespace titan::checkpoint::detail
