#include "cli/report/figure.h"

#include "cli/report/html.h"
#include "cli/text.h"
#include "titan/core/error.h"

namespace titan::cli::report {

namespace {

double distance_of(const Scale& scale, size_t mark) {
  if (scale.is_log()) return scale.marks()[mark];
  return scale.marks().size() > 1 ? scale.marks()[1] - scale.marks()[0] : 1;
}

std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  return str("<text x=\"", pixel(x), "\" y=\"", pixel(y), "\" text-anchor=\"", anchor, "\">", escaped(text),
             "</text>\n");
}

std::string legend_html(const std::vector<std::string>& names) {
  if (names.size() < 2) return "";
  std::string html = "<div class=\"legend\">";
  for (size_t i = 0; i < names.size(); ++i)
    html += str("<span><i class=\"s", i % 8, "\"></i>", escaped(names[i]), "</span>");
  return html + "</div>\n";
}

}  // namespace

double plot_x(const Scale& scale, double value) {
  return kPlotLeft + scale.place(value) * (kPlotRight - kPlotLeft);
}

double plot_y(const Scale& scale, double value) {
  return kPlotBottom - scale.place(value) * (kPlotBottom - kPlotTop);
}

std::string pixel(double value) { return number("%.1f", value); }

std::string axes(const Scale& x, const Scale& y) {
  std::string svg = "<g class=\"axes\">\n";
  for (size_t i = 0; i < y.marks().size(); ++i) {
    const double at = plot_y(y, y.marks()[i]);
    svg += str("<line class=\"grid\" x1=\"", pixel(kPlotLeft), "\" x2=\"", pixel(kPlotRight), "\" y1=\"",
               pixel(at), "\" y2=\"", pixel(at), "\"/>\n");
    svg += text_at(kPlotLeft - 6, at + 4, "end", mark_text(y.marks()[i], distance_of(y, i)));
  }
  for (size_t i = 0; i < x.marks().size(); ++i)
    svg += text_at(plot_x(x, x.marks()[i]), kPlotBottom + 17, "middle",
                   mark_text(x.marks()[i], distance_of(x, i)));
  svg += text_at(kPlotRight, kFigureHeight - 2, "end", "step");
  return svg + "</g>\n";
}

std::string figure(const std::string& title, const std::string& unit, const std::vector<std::string>& legend,
                   const std::string& drawing, const std::string& data) {
  return str("<figure class=\"chart\">\n<figcaption>", escaped(title),
             unit.empty() ? "" : str(" <small>", escaped(unit), "</small>"), "</figcaption>\n",
             legend_html(legend), "<svg viewBox=\"0 0 ", kFigureWidth, " ", kFigureHeight,
             "\" role=\"img\" aria-label=\"", escaped(title), "\">\n", drawing,
             "<line class=\"cursor\" y1=\"", pixel(kPlotTop), "\" y2=\"", pixel(kPlotBottom),
             "\"/>\n</svg>\n<div class=\"tip\"></div>\n<script type=\"application/json\">", data,
             "</script>\n</figure>\n");
}

}  // namespace titan::cli::report
