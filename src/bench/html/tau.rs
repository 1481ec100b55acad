//! What the width of the locality band does to held-out requests.
//!
//! Never draws a gain without the tail beside it.

use super::{
    batches::legend,
    plot::{Frame, Scale, WIDTH, ticks},
    section::{Section, Table},
    svg::{Shape, Svg},
    text::{change, fixed, name, percent},
};
use crate::figures::{Figure, ReportData, TauCurve, TauPoint};

const ID: &str = "tau";
const TITLE: &str = "How wide the band may be";
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 46.0;
const LINES: [(&str, Shape, &str); 3] =
    [("TPOT p50", Shape::Circle, "2"), ("TPOT p99", Shape::Triangle, "3"), ("distinct experts", Shape::Square, "1")];

pub(super) fn section(data: &ReportData) -> Section {
    let curve = match &data.tau {
        Figure::Data(curve) => curve,
        Figure::LeftOut(why) => return Section::left_out(ID, TITLE, why),
    };
    let mut table = Table::new(&["tau", "TPOT p50", "TPOT p99", "distinct experts"]);
    for point in &curve.points {
        let numbers = values(point).map(change);
        table.rows.push([vec![fixed(point.tau, 3)], numbers.to_vec()].concat());
    }
    let chosen = curve.points.iter().find(|point| (point.tau - data.summary.tau).abs() < 1e-6);
    let lead = match chosen {
        Some(point) => format!(
            "At the chosen tau&nbsp;=&nbsp;{} the median TPOT changes by {}, its 99th percentile by {} and the distinct \
             experts by {} against {}.",
            tau(data.summary.tau),
            change(point.tpot_p50_change),
            change(point.tpot_p99_change),
            change(point.experts_change),
            name(&curve.baseline)
        ),
        None => format!("The calibration holds tau&nbsp;=&nbsp;{}.", tau(data.summary.tau)),
    };
    let note = format!(
        "The band replayed against {} on requests that took no part in the fit; below zero is better. At tau&nbsp;=&nbsp;2 \
         every worker is in the band. Tau grows with the square root.",
        name(&curve.baseline)
    );
    Section { id: ID, title: TITLE, lead, note, drawings: vec![drawing(curve, data.summary.tau)], table }
}

fn values(point: &TauPoint) -> [f64; 3] {
    [point.tpot_p50_change, point.tpot_p99_change, point.experts_change]
}

/// As few decimals as it has, two at least.
fn tau(tau: f64) -> String {
    let text = fixed(tau, 3);
    text.strip_suffix('0').map_or_else(|| text.clone(), str::to_owned)
}

fn drawing(curve: &TauCurve, chosen: f64) -> String {
    let mut svg = Svg::new(WIDTH, HEIGHT);
    let all = || curve.points.iter().flat_map(values);
    let marks = ticks(all().fold(-0.01, f64::min), all().fold(0.01, f64::max), 5);
    let widest = curve.points.iter().map(|point| point.tau).fold(chosen, f64::max).max(1e-3);
    let frame = Frame {
        x: Scale::root((0.0, widest), (LEFT + 8.0, WIDTH - 14.0)),
        y: Scale::linear((marks[0], marks[marks.len() - 1]), (HEIGHT - 60.0, 22.0)),
    };
    let digits = usize::from(marks[1] - marks[0] < 0.0099);
    frame.rules(&mut svg, &marks, &format!("change against {}", curve.baseline), |x| percent(x, digits));
    let zero = frame.y.at(0.0);
    svg.line("axis", (LEFT, zero), (WIDTH - 8.0, zero));
    let feet = frame.apart([0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0].into_iter().filter(|x| *x <= widest));
    frame.feet(&mut svg, &feet, "tau", tau);
    let x = frame.x.at(chosen);
    svg.line("mark", (x, 22.0), (x, HEIGHT - 60.0));
    let is_left = x > WIDTH / 2.0;
    let text = if is_left { "l b e" } else { "l b" };
    svg.text(text, (x + if is_left { -6.0 } else { 6.0 }, HEIGHT - 66.0), &format!("tau = {}", tau(chosen)));
    for (at, (name, shape, class)) in LINES.into_iter().enumerate() {
        let places: Vec<(f64, f64)> =
            curve.points.iter().map(|point| frame.place(point.tau, values(point)[at])).collect();
        svg.polyline(&format!("l{class}"), &places);
        for &place in &places {
            svg.mark(&format!("s{class}"), shape, place, 3.4);
        }
        legend(&mut svg, (LEFT + 108.0 * at as f64, HEIGHT - 12.0), name, shape, class);
    }
    let described: Vec<String> = curve
        .points
        .iter()
        .map(|point| {
            let [p50, p99, experts] = values(point).map(change);
            format!("tau {}: p50 {p50}, p99 {p99}, experts {experts}", fixed(point.tau, 3))
        })
        .collect();
    svg.finish(ID, "Change of TPOT and distinct experts against tau", &format!("{}.", described.join("; ")))
}
