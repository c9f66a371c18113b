#pragma once

// What drawings share: the frame with its axes.

#include <string>
#include <vector>

#include "cli/report/scale.h"

namespace titan::cli::report {

inline constexpr double kFigureWidth = 560, kFigureHeight = 250;
inline constexpr double kPlotLeft = 58, kPlotRight = 538, kPlotTop = 10, kPlotBottom = 216;

double plot_x(const Scale& scale, double value);
double plot_y(const Scale& scale, double value);
/// With one decimal, as SVG takes it.
std::string pixel(double value);

std::string axes(const Scale& x, const Scale& y);
/// `<figure>` with title and legend around a drawing; `data`: JSON for the page's script.
std::string figure(const std::string& title, const std::string& unit, const std::vector<std::string>& legend,
                   const std::string& drawing, const std::string& data);

}  // namespace titan::cli::report
