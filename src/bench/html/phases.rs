//! Prefill picks against decode picks, and their correlation layer by layer.
//!
//! Never draws a line of best fit: the diagonal is what a perfect forecast would be.

use super::{
    plot::{Frame, Scale, WIDTH, ticks},
    section::{Section, Table},
    svg::Svg,
    text::{count, fixed, maybe, percent},
};
use crate::figures::{Figure, Phases, ReportData};

const ID: &str = "phases";
const TITLE: &str = "Prefill picks against decode picks";
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 46.0;

pub(super) fn section(data: &ReportData) -> Section {
    let phases = match &data.phases {
        Figure::Data(phases) => phases,
        Figure::LeftOut(why) => return Section::left_out(ID, TITLE, why),
    };
    let mut table = Table::new(&["layer", "r over all", "r of a request"]);
    table.rows.push(vec!["all".to_owned(), maybe(phases.r), maybe(phases.r_of_request)]);
    for layer in &phases.layers {
        table.rows.push(vec![layer.layer.to_string(), maybe(layer.r), maybe(layer.r_of_request)]);
    }
    let lead = match (phases.r, phases.r_of_request) {
        (Some(r), Some(of_request)) => format!(
            "Over all requests, layers and experts the two shares correlate with r&nbsp;=&nbsp;{}; within one request \
             the average is {}.",
            fixed(r, 2),
            fixed(of_request, 2)
        ),
        _ => "The shares of one side are all equal, so their correlation is undefined.".to_owned(),
    };
    let drawn = phases.points.len();
    let sample = if drawn < phases.n_picked {
        format!(
            "{} of {} points are drawn, one from each equal stretch; r is over all.",
            count(drawn as u64),
            count(phases.n_picked as u64)
        )
    } else {
        String::new()
    };
    let note = format!(
        "A point is an expert in one layer for one request: its share of the prompt&rsquo;s picks and of the answer&rsquo;s. \
         Axes grow with the square root. {sample}"
    );
    Section { id: ID, title: TITLE, lead, note, drawings: vec![scatter(phases), by_layer(phases)], table }
}

fn scatter(phases: &Phases) -> String {
    let mut svg = Svg::new(WIDTH, HEIGHT);
    let highest = |axis: usize| phases.points.iter().map(|point| point[axis]).fold(0.01, f64::max);
    let end = highest(0).max(highest(1)).min(1.0);
    let frame =
        Frame { x: Scale::root((0.0, end), (LEFT, WIDTH - 8.0)), y: Scale::root((0.0, end), (HEIGHT - 38.0, 22.0)) };
    let marks = [0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0];
    let marks = frame.apart(marks.into_iter().filter(|x| *x <= end));
    let label = |x: f64| percent(x, 0);
    frame.rules(&mut svg, &marks, "share of the answer's picks", label);
    frame.feet(&mut svg, &marks, "share of the prompt's picks", label);
    svg.line("ideal", frame.place(0.0, 0.0), frame.place(end, end));
    for &[x, y] in &phases.points {
        svg.circle("dot", frame.place(x, y), 1.7);
    }
    let description = format!("{} points about the diagonal, r = {}.", phases.points.len(), maybe(phases.r));
    svg.finish("phases-points", "Decode share of picks against prefill share", &description)
}

fn by_layer(phases: &Phases) -> String {
    let mut svg = Svg::new(WIDTH, HEIGHT);
    let all: Vec<f64> = phases.layers.iter().flat_map(|layer| [layer.r, layer.r_of_request]).flatten().collect();
    let low = all.iter().copied().fold(0.0, f64::min);
    let marks = ticks(low, 1.0, 5);
    let n = phases.layers.len();
    let frame = Frame {
        x: Scale::linear((-0.5, n as f64 - 0.5), (LEFT, WIDTH - 8.0)),
        y: Scale::linear((marks[0], 1.0), (HEIGHT - 38.0, 22.0)),
    };
    frame.rules(&mut svg, &marks, "r", |x| fixed(x, 1));
    let step = n.div_ceil(16).max(1);
    let named: Vec<f64> = (0..n).step_by(step).map(|at| at as f64).collect();
    frame.feet(&mut svg, &named, "layer", |x| phases.layers[x as usize].layer.to_string());
    for (at, layer) in phases.layers.iter().enumerate() {
        let x = frame.x.at(at as f64);
        if let Some(r) = layer.r {
            svg.line("stem", (x, frame.y.at(0.0)), (x, frame.y.at(r)));
            svg.circle("s1", (x, frame.y.at(r)), 2.8);
        }
        if let Some(r) = layer.r_of_request {
            svg.circle("ring2", (x, frame.y.at(r)), 4.8);
        }
    }
    let y = HEIGHT - 5.0;
    svg.circle("s1", (LEFT + 4.0, y - 3.8), 2.8);
    svg.text("t", (LEFT + 13.0, y), "over all requests");
    svg.circle("ring2", (LEFT + 122.0, y - 3.8), 4.8);
    svg.text("t", (LEFT + 131.0, y), "within a request");
    let numbers: Vec<String> = phases.layers.iter().map(|l| format!("layer {} {}", l.layer, maybe(l.r))).collect();
    svg.finish("phases-layers", "Correlation of prefill and decode picks by layer", &format!("{}.", numbers.join(", ")))
}
