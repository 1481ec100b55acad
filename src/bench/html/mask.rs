//! Rho against the number of kept layers.
//!
//! Never hides the layers that were left out of the mask.

use super::{
    plot::{Frame, Scale, WIDTH, ticks},
    section::{Section, Table},
    svg::Svg,
    text::{fixed, n_of},
};
use crate::figures::{ReportData, RhoCurve};

const ID: &str = "mask";
const TITLE: &str = "How many layers to compare";
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 40.0;

pub(super) fn section(data: &ReportData) -> Section {
    let curve = &data.mask;
    let mut table = Table::new(&["layers", "added", "rho", "kept"]);
    for (at, (layer, &rho)) in curve.layers.iter().zip(&curve.rho).enumerate() {
        let is_kept = if at < curve.n_kept { "yes" } else { "" };
        table.rows.push(vec![(at + 1).to_string(), format!("layer {layer}"), fixed(rho, 4), is_kept.to_owned()]);
    }
    let all = match curve.rho_all_layers {
        Some(rho) => format!("; with every usable layer it is {}", fixed(rho, 3)),
        None => String::new(),
    };
    let lead = format!(
        "Rho is highest, {}, with <strong>N*&nbsp;=&nbsp;{}</strong>{all}.",
        fixed(data.summary.rho, 3),
        n_of(curve.n_kept, "layer")
    );
    let note = "Each step adds the layer that raises rho most, or lowers it least. The mask is the prefix with the \
                highest rho."
        .to_owned();
    Section { id: ID, title: TITLE, lead, note, drawings: vec![drawing(curve)], table }
}

fn drawing(curve: &RhoCurve) -> String {
    let mut svg = Svg::new(WIDTH, HEIGHT);
    let numbers = || curve.rho.iter().copied().chain(curve.rho_all_layers);
    let (low, high) = (numbers().fold(f64::INFINITY, f64::min), numbers().fold(f64::NEG_INFINITY, f64::max));
    // A curve has no bars, so its axis may start where it does; but noise is not blown up to fill the frame.
    let middle = f64::midpoint(low, high);
    let marks = ticks(low.min(middle - 0.02), high.max(middle + 0.02), 4);
    let n = curve.rho.len();
    let frame = Frame {
        x: Scale::linear((1.0, n.max(2) as f64), (LEFT + 12.0, WIDTH - 14.0)),
        y: Scale::linear((marks[0], marks[marks.len() - 1]), (HEIGHT - 38.0, 24.0)),
    };
    let digits = if marks[1] - marks[0] < 0.0099 { 3 } else { 2 };
    frame.rules(&mut svg, &marks, "rho", |x| fixed(x, digits));
    let step = n.div_ceil(12).max(1);
    let feet: Vec<f64> = (1..=n).step_by(step).map(|at| at as f64).collect();
    frame.feet(&mut svg, &feet, "layers compared", |x| fixed(x, 0));
    if let Some(rho) = curve.rho_all_layers {
        let y = frame.y.at(rho);
        svg.line("ideal", (LEFT, y), (WIDTH - 8.0, y));
    }
    let places: Vec<(f64, f64)> =
        curve.rho.iter().enumerate().map(|(at, &rho)| frame.place((at + 1) as f64, rho)).collect();
    svg.polyline("l2", &places);
    for &place in &places {
        svg.circle("s2", place, if n > 24 { 2.0 } else { 3.2 });
    }
    if let Some(&(x, y)) = places.get(curve.n_kept.saturating_sub(1)) {
        svg.line("mark", (x, y), (x, frame.y.at(marks[0])));
        svg.circle("pick", (x, y), 5.5);
        let name = format!("N* = {}", curve.n_kept);
        let is_left = curve.n_kept * 2 > n;
        svg.text(if is_left { "l b e" } else { "l b" }, (x + if is_left { -6.0 } else { 6.0 }, HEIGHT - 46.0), &name);
    }
    let peak = curve.rho.get(curve.n_kept.saturating_sub(1)).copied().unwrap_or_default();
    let order: Vec<String> = curve.layers.iter().map(ToString::to_string).collect();
    let description = format!(
        "Highest with {}: {}. Layers in the order they were chosen: {}.",
        n_of(curve.n_kept, "layer"),
        fixed(peak, 3),
        order.join(", ")
    );
    svg.finish(ID, "Rho against the number of layers compared", &description)
}
