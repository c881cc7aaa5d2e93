// SPDX-License-Identifier: Apache-2.0
//! A report as an SVG plot: three panels over one time axis.

use std::fmt::Write;

use crate::sim::metrics::Row;
use crate::sim::report::Report;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 40.0;
const GAP: f64 = 36.0;
/// More points would not be visible.
const MOST_POINTS: usize = 480;

/// One panel: its position, and the maximum of its axis.
struct Panel {
    title: &'static str,
    top: f64,
    height: f64,
    max: f64,
}

pub(crate) fn draw(report: &Report) -> String {
    let step = report.rows.len().div_ceil(MOST_POINTS).max(1);
    let rows: Vec<&Row> = report.rows.iter().step_by(step).collect();
    let most_workers = rows.iter().map(|row| row.n_workers()).max().unwrap_or(0).max(1);
    let most_pending = rows.iter().map(|row| row.n_pending).max().unwrap_or(0).max(1);
    let panel = |title, top, height, max| Panel { title, top, height, max };
    let workers = panel("workers by job", TOP, 280.0, f64::from(most_workers));
    let load = panel("utilization, %", workers.bottom() + GAP, 120.0, 100.0);
    let waiting = panel("jobs waiting", load.bottom() + GAP, 90.0, most_pending as f64);
    let height = waiting.bottom() + GAP;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"20\" font-size=\"15\">{} under {}, seed {}</text>\n",
        report.scenario, report.policy, report.seed
    );
    let end = rows.last().map_or(1.0, |row| row.secs()).max(1.0);
    let x = |row: &Row| LEFT + (WIDTH - LEFT - 20.0) * row.secs() / end;
    draw_stack(&mut svg, &workers, &rows, &x);
    let used: Vec<f64> = rows.iter().map(|row| report.utilization(row)).collect();
    let pending: Vec<f64> = rows.iter().map(|row| row.n_pending as f64).collect();
    for (panel, values) in [(&load, used), (&waiting, pending)] {
        let point = |(row, value): (&&Row, f64)| format!("{:.1},{:.1}", x(row), panel.y(value));
        let points: Vec<String> = rows.iter().zip(values).map(point).collect();
        add(
            &mut svg,
            &format!(
                "<polyline fill=\"none\" stroke=\"#1f6fb4\" stroke-width=\"1.5\" points=\"{}\"/>",
                points.join(" ")
            ),
        );
    }
    for panel in [&workers, &load, &waiting] {
        panel.frame(&mut svg, end);
    }
    svg.push_str("</svg>\n");
    svg
}

/// Each job's workers on top of those of the jobs before it.
fn draw_stack(svg: &mut String, panel: &Panel, rows: &[&Row], x: &impl Fn(&Row) -> f64) {
    let n_jobs = rows.first().map_or(0, |row| row.workers.len());
    let mut below = vec![0.0; rows.len()];
    for job in 0..n_jobs {
        let above: Vec<f64> =
            rows.iter().zip(&below).map(|(row, base)| base + f64::from(row.workers[job])).collect();
        let point = |(row, y): (&&Row, &f64)| format!("{:.1},{:.1}", x(row), panel.y(*y));
        let mut points: Vec<String> = rows.iter().zip(&above).map(point).collect();
        points.extend(rows.iter().zip(&below).rev().map(point));
        // The golden angle gives neighbors different hues.
        let hue = (job as f64 * 137.5) % 360.0;
        add(
            svg,
            &format!("<polygon fill=\"hsl({hue:.0},55%,60%)\" points=\"{}\"/>", points.join(" ")),
        );
        below = above;
    }
}

impl Panel {
    fn bottom(&self) -> f64 {
        self.top + self.height
    }

    fn y(&self, value: f64) -> f64 {
        self.bottom() - self.height * value / self.max
    }

    fn frame(&self, svg: &mut String, end_secs: f64) {
        let Self { title, top, height, max } = self;
        let width = WIDTH - LEFT - 20.0;
        let label_y = self.bottom() + 14.0;
        add(
            svg,
            &format!(
                "<rect x=\"{LEFT}\" y=\"{top}\" width=\"{width}\" height=\"{height}\" \
             fill=\"none\" stroke=\"#555\"/>\n\
             <text x=\"{LEFT}\" y=\"{:.0}\">{title}</text>\n\
             <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{max:.0}</text>\n\
             <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">0</text>\n\
             <text x=\"{:.0}\" y=\"{label_y:.0}\" text-anchor=\"end\">{end_secs:.0} s</text>",
                top - 5.0,
                LEFT - 6.0,
                top + 10.0,
                LEFT - 6.0,
                self.bottom(),
                LEFT + width,
            ),
        );
    }
}

fn add(svg: &mut String, line: &str) {
    writeln!(svg, "{line}").expect("a string takes everything");
}
