//! Distinct experts against batch size.
//!
//! Never starts the vertical axis above zero.

use super::{
    plot::{Frame, Scale, WIDTH, ticks},
    section::{Section, Table},
    svg::{Shape, Svg},
    text::{change, count, fixed, percent},
};
use crate::figures::{BatchSize, Batches, Figure, ReportData};

const ID: &str = "batches";
const TITLE: &str = "Distinct experts against batch size";
const HEIGHT: f64 = 280.0;
const LEFT: f64 = 34.0;
/// Sizes whose difference is written beside the lines: smaller batches share little in any case.
const SMALLEST_NAMED: usize = 4;

pub(super) fn section(data: &ReportData) -> Section {
    let batches = match &data.batches {
        Figure::Data(batches) => batches,
        Figure::LeftOut(why) => return Section::left_out(ID, TITLE, why),
    };
    let mut table = Table::new(&["batch", "mixed", "one label", "fewer by", "drawn from"]);
    for size in &batches.sizes {
        let with_error = |mean: f64, error: f64| format!("{} &plusmn; {}", fixed(mean, 2), fixed(error, 2));
        let dash = || "&ndash;".to_owned();
        table.rows.push(vec![
            size.size.to_string(),
            with_error(size.mixed, size.mixed_error),
            size.same.zip(size.same_error).map_or_else(dash, |(mean, error)| with_error(mean, error)),
            size.reduction.map_or_else(dash, |share| percent(share, 1)),
            count(size.n_requests as u64),
        ]);
    }
    let changes: Vec<String> = batches
        .sizes
        .iter()
        .filter(|size| size.size >= SMALLEST_NAMED)
        .filter_map(|size| Some(format!("<strong>{}</strong> at {}", change(-size.reduction?), size.size)))
        .collect();
    let lead = if changes.is_empty() {
        "No label has enough requests for a batch, so only mixed batches can be drawn.".to_owned()
    } else {
        format!("Requests of one label against mixed ones: {}.", changes.join(", "))
    };
    let note = format!(
        "Mean distinct experts a layer of {} experts in one decode step, over {} batches of each kind drawn from the \
         recorded picks: different requests, each at a random step of its own; mixed batches come from the requests of \
         the same labels. The table has standard errors.",
        batches.n_expert, batches.n_draws
    );
    Section { id: ID, title: TITLE, lead, note, drawings: vec![drawing(batches)], table }
}

fn drawing(batches: &Batches) -> String {
    let mut svg = Svg::new(WIDTH, HEIGHT);
    let sizes = &batches.sizes;
    let highest = sizes.iter().map(|size| size.mixed.max(size.same.unwrap_or(0.0))).fold(1.0, f64::max);
    let marks = ticks(0.0, highest, 4);
    let frame = Frame {
        x: Scale::linear((0.0, (sizes.len().max(2) - 1) as f64), (LEFT + 12.0, WIDTH - 26.0)),
        y: Scale::linear((0.0, marks[marks.len() - 1]), (HEIGHT - 38.0, 22.0)),
    };
    frame.rules(&mut svg, &marks, "distinct experts a layer", |x| fixed(x, 0));
    let places: Vec<f64> = (0..sizes.len()).map(|at| at as f64).collect();
    frame.feet(&mut svg, &places, "requests in a batch", |x| sizes[x as usize].size.to_string());
    let line = |value: &dyn Fn(&BatchSize) -> Option<f64>| -> Vec<(f64, f64)> {
        sizes.iter().enumerate().filter_map(|(at, size)| Some(frame.place(at as f64, value(size)?))).collect()
    };
    let (mixed, same) = (line(&|size| Some(size.mixed)), line(&|size| size.same));
    for (class, shape, points) in [("1", Shape::Circle, &mixed), ("2", Shape::Square, &same)] {
        svg.polyline(&format!("l{class}"), points);
        for &point in points {
            svg.mark(&format!("s{class}"), shape, point, 3.6);
        }
    }
    let mut described = Vec::new();
    for (at, size) in sizes.iter().enumerate() {
        let Some((same, reduction)) = size.same.zip(size.reduction) else { continue };
        described.push(format!("{} requests {} against {}", size.size, fixed(same, 1), fixed(size.mixed, 1)));
        if size.size >= SMALLEST_NAMED {
            let (x, y) = frame.place(at as f64, same);
            svg.text("l m", (x + 4.0, y + 19.0), &percent(-reduction, 0));
        }
    }
    legend(&mut svg, (LEFT + 12.0, 34.0), "mixed", Shape::Circle, "1");
    if !same.is_empty() {
        legend(&mut svg, (LEFT + 12.0, 51.0), "one label", Shape::Square, "2");
    }
    let description = if described.is_empty() {
        format!("Mixed batches of up to {} requests.", sizes.last().map_or(0, |size| size.size))
    } else {
        format!("One label against mixed: {}.", described.join(", "))
    };
    svg.finish(ID, "Distinct experts a layer against batch size", &description)
}

/// A sample of a line and its name.
pub(super) fn legend(svg: &mut Svg, (x, y): (f64, f64), name: &str, shape: Shape, class: &str) {
    svg.line(&format!("l{class}"), (x, y), (x + 18.0, y));
    svg.mark(&format!("s{class}"), shape, (x + 9.0, y), 3.6);
    svg.text("l", (x + 25.0, y + 3.8), name);
}
