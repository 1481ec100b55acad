//! Rows as line charts: one for each setting that is a number and each measure, on linear or logarithmic axes.
//!
//! Never draws a line between different settings.

use std::fmt::Write as _;

use serde_json::Value;

use super::{
    Rows,
    group::{Group, groups, varying},
    growth::exponents,
    markdown::{called, digits},
};
use crate::bench::html::{escape, ticks};

const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 44.0;
/// More lines than these are not told apart.
const MOST: usize = 8;
/// What is drawn, where it was measured.
const DRAWN: [&str; 8] = [
    "tpot_p50_ms",
    "tpot_p99_ms",
    "ttft_p50_ms",
    "experts_per_step",
    "experts_per_token",
    "tokens_per_s",
    "gb_per_s",
    "us",
];

pub(super) const STYLE: &str = "svg{font:12px system-ui,sans-serif}.p{fill:none;stroke:#d0d7de}.t{fill:#59636e}.h{fill:#1f2328;\
font-weight:600}.m{text-anchor:middle}.e{text-anchor:end}.s{fill:none;stroke-width:2}.s0{stroke:#3b7dc4}.s1{stroke:#d08a2e}\
.s2{stroke:#2e967d}.s3{stroke:#b3476b}.s4{stroke:#7a5fc0}.s5{stroke:#6d7b2c}.s6{stroke:#2f8fa8}.s7{stroke:#8a6a52}\
@media(prefers-color-scheme:dark){.p{stroke:#3d444d}.t{fill:#9198a1}.h{fill:#e6edf3}}";

struct Line {
    name: String,
    points: Vec<(f64, f64)>,
}

struct Chart {
    title: String,
    x: String,
    log: bool,
    lines: Vec<Line>,
}

/// All charts of the rows, one below another, as an SVG document; nothing where no setting with numbers varies.
pub fn svg(rows: &Rows) -> Option<String> {
    let charts = charts(rows);
    if charts.is_empty() {
        return None;
    }
    let height = HEIGHT * charts.len() as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\">\
         <style>{STYLE}</style>\n"
    );
    for (nth, chart) in charts.iter().enumerate() {
        let _ = writeln!(out, "<g transform=\"translate(0 {})\">{}</g>", HEIGHT * nth as f64, chart.body());
    }
    Some(out + "</svg>\n")
}

/// Each chart as an element of its own.
pub(super) fn elements(rows: &Rows) -> Vec<String> {
    let element = |chart: &Chart| {
        let title = escape(&chart.title);
        format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\"><title>{title}</title>{}</svg>", chart.body())
    };
    charts(rows).iter().map(element).collect()
}

fn charts(rows: &Rows) -> Vec<Chart> {
    let all = groups(rows);
    let mut charts = Vec::new();
    let mut verbs: Vec<&str> = all.iter().map(|group| group.verb.as_str()).filter(|verb| *verb != "growth").collect();
    verbs.dedup();
    for verb in verbs {
        let own: Vec<&Group> = all.iter().filter(|group| group.verb == verb).collect();
        for x in varying(&own) {
            let with: Vec<&Group> = own.iter().copied().filter(|group| number(group, &x).is_some()).collect();
            let settings: Vec<String> = varying(&with).into_iter().filter(|name| !follows(&with, name, &x)).collect();
            let measures = DRAWN.iter().filter(|name| with.iter().any(|group| group.samples.contains_key(**name)));
            charts.extend(measures.filter_map(|measure| chart(&with, &settings, &x, measure)));
        }
    }
    let lines = exponents(rows)
        .into_iter()
        .map(|one| Line { name: format!("{} by {}: {:.2}", one.what, one.by, one.exponent), points: one.points });
    let lines: Vec<Line> = lines.filter(|line| line.points.iter().all(|&(x, y)| x > 0.0 && y > 0.0)).collect();
    for (nth, some) in lines.chunks(MOST).map(<[Line]>::to_vec).enumerate() {
        let title =
            if nth == 0 { "Growth of costs, us".to_owned() } else { format!("Growth of costs, us ({})", nth + 1) };
        charts.push(Chart { title, x: "size".to_owned(), log: true, lines: some });
    }
    charts
}

fn number(group: &Group, setting: &str) -> Option<f64> {
    group.setting.get(setting).and_then(Value::as_f64)
}

/// Whether a setting only changes where `x` does, as the number of prefill workers may with that of decode workers: then it
/// tells no lines apart.
fn follows(own: &[&Group], name: &str, x: &str) -> bool {
    own.iter()
        .all(|a| own.iter().all(|b| a.setting.get(x) != b.setting.get(x) || a.setting.get(name) == b.setting.get(name)))
}

/// `own` all have the number `x`; `settings` are what else tells them apart.
fn chart(own: &[&Group], settings: &[String], x: &str, measure: &str) -> Option<Chart> {
    let mut lines: Vec<Line> = Vec::new();
    for group in own {
        let name: Vec<String> = settings
            .iter()
            .map(|name| {
                let value = group.shown(name);
                if name == "policy" { value } else { format!("{name} {value}") }
            })
            .collect();
        let name = name.join(", ");
        let (Some(at), Some((mean, _))) = (number(group, x), group.measured(measure)) else { continue };
        match lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push((at, mean)),
            None => lines.push(Line { name, points: vec![(at, mean)] }),
        }
    }
    lines.retain(|line| line.points.len() > 1);
    for line in &mut lines {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    lines.truncate(MOST);
    let title = called(measure).to_owned();
    (!lines.is_empty()).then(|| Chart { title, x: x.to_owned(), log: false, lines })
}

impl Clone for Line {
    fn clone(&self) -> Self {
        Self { name: self.name.clone(), points: self.points.clone() }
    }
}

impl Chart {
    fn body(&self) -> String {
        let points = || self.lines.iter().flat_map(|line| line.points.iter().copied());
        let range = |of: fn((f64, f64)) -> f64| {
            points().map(of).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)))
        };
        let (xs, ys) = (range(|point| point.0), range(|point| point.1));
        let (marks_x, marks_y) =
            if self.log { (decades(xs), decades(ys)) } else { (ticks(xs.0, xs.1, 5), ticks(0.0, ys.1.max(1e-9), 5)) };
        let warp = |x: f64| if self.log { x.log10() } else { x };
        let span = |marks: &[f64]| (warp(marks[0]), warp(marks[marks.len() - 1]));
        let (span_x, span_y) = (span(&marks_x), span(&marks_y));
        let place = |(low, high): (f64, f64), x: f64| (warp(x) - low) / (high - low).max(1e-12);
        let x = |value: f64| LEFT + place(span_x, value) * (WIDTH - LEFT - RIGHT);
        let y = |value: f64| HEIGHT - BOTTOM - place(span_y, value) * (HEIGHT - TOP - BOTTOM);
        let mut out = format!("<text class=\"h\" x=\"8\" y=\"18\">{}</text>", escape(&self.title));
        for &mark in &marks_y {
            let (at, right) = (y(mark), WIDTH - RIGHT);
            let _ = write!(out, "<path class=\"p\" d=\"M{LEFT} {at:.1}H{right}\"/>");
            let _ =
                write!(out, "<text class=\"t e\" x=\"{:.1}\" y=\"{:.1}\">{}</text>", LEFT - 6.0, at + 4.0, axis(mark));
        }
        for &mark in &marks_x {
            let foot = HEIGHT - BOTTOM + 16.0;
            let _ = write!(out, "<text class=\"t m\" x=\"{:.1}\" y=\"{foot}\">{}</text>", x(mark), axis(mark));
        }
        let middle = f64::midpoint(LEFT, WIDTH - RIGHT);
        let _ = write!(out, "<text class=\"t m\" x=\"{middle}\" y=\"{}\">{}</text>", HEIGHT - 10.0, escape(&self.x));
        for (nth, line) in self.lines.iter().enumerate() {
            let place = |&(a, b): &(f64, f64)| format!("{:.1},{:.1}", x(a), y(b));
            let points: Vec<String> = line.points.iter().map(place).collect();
            let _ = write!(out, "<polyline class=\"s s{nth}\" points=\"{}\"/>", points.join(" "));
            for &(a, b) in &line.points {
                let _ = write!(out, "<circle class=\"s s{nth}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"2\"/>", x(a), y(b));
            }
            let (at, left) = (TOP + 6.0 + 16.0 * nth as f64, WIDTH - RIGHT + 10.0);
            let _ = write!(out, "<path class=\"s s{nth}\" d=\"M{left} {at}h14\"/>");
            let name = escape(&line.name);
            let _ = write!(out, "<text class=\"t\" x=\"{}\" y=\"{}\">{name}</text>", left + 20.0, at + 4.0);
        }
        out
    }
}

/// Powers of ten around a range of numbers above 0.
fn decades((low, high): (f64, f64)) -> Vec<f64> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    (first..=last.max(first + 1)).map(|power| 10f64.powi(power)).collect()
}

fn axis(x: f64) -> String {
    if x >= 1e5 || (x > 0.0 && x < 1e-3) {
        format!("{x:e}")
    } else {
        digits(x).trim_end_matches(".00").trim_end_matches(".0").to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::rows::{growth, tests::sample};

    fn points(svg: &str, line: usize) -> Vec<(f64, f64)> {
        let start = format!("<polyline class=\"s s{line}\" points=\"");
        let (_, rest) = svg.split_once(&start).expect("the line");
        let (list, _) = rest.split_once('"').expect("its end");
        let pair = |point: &str| {
            let (x, y) = point.split_once(',').expect("two numbers");
            (x.parse().expect("x"), y.parse().expect("y"))
        };
        list.split(' ').map(pair).collect()
    }

    #[test]
    fn a_line_for_each_policy_over_the_rates() {
        let rows = sample();
        assert_eq!(
            charts(&rows).iter().map(|chart| chart.title.as_str()).collect::<Vec<_>>(),
            ["TPOT p50, ms", "TPOT p99, ms", "experts read a token"]
        );
        let first = &elements(&rows)[0];
        let (even, ours) = (points(first, 0), points(first, 1));
        assert_eq!((even.len(), ours.len()), (2, 2));
        // Up is down in SVG: 20 and 30 ms above an axis from 0, 18 and 27 ms below them.
        let floor = HEIGHT - BOTTOM;
        assert!(((floor - even[0].1) / (floor - even[1].1) - 20.0 / 30.0).abs() < 0.01);
        assert!(ours[0].1 > even[0].1 && ours[1].1 > even[1].1 && even[0].0 < even[1].0);
        let document = svg(&rows).expect("three charts");
        assert!(document.starts_with("<svg xmlns") && document.matches("<g transform").count() == 3);
    }

    #[test]
    fn growth_is_straight_on_logarithmic_axes() {
        let rows = growth::tests::sample();
        let line = points(&elements(&rows)[0], 0);
        let slope = |a: (f64, f64), b: (f64, f64)| (b.1 - a.1) / (b.0 - a.0);
        assert!((slope(line[0], line[1]) - slope(line[1], line[2])).abs() < 0.01, "{line:?}");
        assert!(elements(&rows)[0].contains("routing by workers: 2.00"));
    }

    #[test]
    fn a_setting_that_follows_another_parts_no_line_and_rows_without_the_setting_hide_none() {
        // "there is nothing to draw": pools whose prefill workers grow with them, beside rows that have rates.
        let mut rows = sample();
        for row in &mut rows.rows {
            let rate = row.setting.remove("rate").and_then(|rate| rate.as_f64()).expect("a rate");
            row.setting.insert("workers".to_owned(), rate.into());
            row.setting.insert("prefill".to_owned(), (rate / 4.0).into());
        }
        let pools = charts(&rows);
        assert_eq!(pools.iter().filter(|chart| chart.x == "workers").count(), 3);
        assert!(pools.iter().all(|chart| chart.lines.iter().all(|line| line.points.len() == 2)));
        rows.rows.extend(sample().rows);
        let both = charts(&rows);
        let of = |x: &str| both.iter().filter(|chart| chart.x == x).count();
        assert_eq!((of("workers"), of("rate")), (3, 3));
    }

    #[test]
    fn nothing_to_draw_is_no_chart() {
        let mut rows = sample();
        rows.rows.truncate(3);
        assert_eq!(svg(&rows), None);
    }
}
