//! Signatures and centroids in the plane of the first two principal components.
//!
//! Never stretches one axis against the other: distances on the page are those in the plane.

use super::{
    labels,
    plot::WIDTH,
    section::{Section, Table},
    svg::{Shape, Svg},
    text::{count, fixed, percent},
};
use crate::figures::{Components, Figure, ReportData};

const ID: &str = "components";
const TITLE: &str = "Signatures and centroids in two dimensions";
const MAX_HEIGHT: f64 = 330.0;
const TOP: f64 = 22.0;
const MARGIN: f64 = 14.0;
/// Height of a centroid's disc.
const DISC: f64 = 17.0;

pub(super) fn section(data: &ReportData) -> Section {
    let components = match &data.components {
        Figure::Data(components) => components,
        Figure::LeftOut(why) => return Section::left_out(ID, TITLE, why),
    };
    let [first, second] = components.explained;
    let mut table = Table::new(&["worker", "centroid, first", "second", "requests drawn"]);
    for (worker, centroid) in components.centroids.iter().enumerate() {
        let n = components.points.iter().filter(|point| point.worker == Some(worker as u32)).count();
        table.rows.push(vec![worker.to_string(), fixed(centroid[0], 3), fixed(centroid[1], 3), count(n as u64)]);
    }
    let lead = format!(
        "The plane shows {} of the spread of all signatures; the rest lies in directions that can not be drawn.",
        percent(first + second, 0)
    );
    let drawn = components.points.len();
    let sample = if drawn < components.n_signatures {
        format!(" {} of {} requests are drawn.", count(drawn as u64), count(components.n_signatures as u64))
    } else {
        String::new()
    };
    let note = format!(
        "A point is a request; a numbered disc is a worker&rsquo;s centroid, scaled to length 1 as \
         signatures are; those that lie too close share one.{sample} The requests&rsquo; coordinates are in <code>report.json</code>."
    );
    Section { id: ID, title: TITLE, lead, note, drawings: vec![drawing(data, components)], table }
}

fn drawing(data: &ReportData, components: &Components) -> String {
    let places = || components.points.iter().map(|p| [p.x, p.y]).chain(components.centroids.iter().copied());
    let range = |axis: usize| {
        let all = || places().map(|place| place[axis]);
        (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max))
    };
    let ((x_low, x_high), (y_low, y_high)) = (range(0), range(1));
    let inner = WIDTH - 2.0 * MARGIN;
    let scale = (inner / (x_high - x_low).max(1e-6)).min((MAX_HEIGHT - 2.0 * MARGIN) / (y_high - y_low).max(1e-6));
    let height = ((y_high - y_low) * scale + 2.0 * MARGIN).max(80.0);
    let at = |x: f64, y: f64| {
        let (middle_x, middle_y) = (f64::midpoint(x_low, x_high), f64::midpoint(y_low, y_high));
        (WIDTH / 2.0 + (x - middle_x) * scale, TOP + height / 2.0 - (y - middle_y) * scale)
    };
    let has_others = components.points.iter().any(|point| point.label.is_none()) && !data.labels.names.is_empty();
    let legend = labels::Legend::of(&data.labels, has_others);
    let mut svg = Svg::new(WIDTH, TOP + height + 24.0 + legend.height());
    svg.rect("pane", (0.5, TOP), (WIDTH - 1.0, height));
    let [first, second] = components.explained;
    svg.text("t", (0.0, 11.0), &format!("second component, {} of the spread", percent(second, 0)));
    svg.text("t e", (WIDTH, TOP + height + 15.0), &format!("first component, {} of the spread", percent(first, 0)));
    let (x, y) = at(0.0, 0.0);
    svg.line("rule", (x, TOP), (x, TOP + height));
    svg.line("rule", (0.5, y), (WIDTH - 0.5, y));
    for point in &components.points {
        let (class, shape) = match point.label {
            Some(place) => (format!("pt f{place}"), Shape::of_label(place)),
            None => ("pt fo".to_owned(), Shape::Circle),
        };
        svg.mark(&class, shape, at(point.x, point.y), 2.8);
    }
    let centroids: Vec<(f64, f64)> = components.centroids.iter().map(|&[x, y]| at(x, y)).collect();
    for ((x, y), workers) in groups(&centroids) {
        let label: Vec<String> = workers.iter().map(ToString::to_string).collect();
        let label = label.join(" ");
        let width = DISC + 6.0 * (label.len() - 1) as f64;
        svg.rect("disc", (x - width / 2.0, y - DISC / 2.0), (width, DISC));
        svg.text("num m", (x, y + 3.6), &label);
    }
    legend.draw(&mut svg, (0.0, TOP + height + 32.0), true);
    let description = format!(
        "{} requests and {} centroids; the axes hold {} and {} of the spread.",
        components.points.len(),
        components.centroids.len(),
        percent(first, 0),
        percent(second, 0)
    );
    svg.finish(ID, "Signatures in their first two principal components", &description)
}

/// Discs that do not hide one another: each place with the workers whose centroids are there or too close to it.
fn groups(centroids: &[(f64, f64)]) -> Vec<((f64, f64), Vec<usize>)> {
    let mut groups: Vec<((f64, f64), Vec<usize>)> = Vec::new();
    for (worker, &(x, y)) in centroids.iter().enumerate() {
        let near = |((other_x, other_y), _): &&mut ((f64, f64), Vec<usize>)| (x - other_x).hypot(y - other_y) < DISC;
        match groups.iter_mut().find(near) {
            Some((_, workers)) => workers.push(worker),
            None => groups.push(((x, y), vec![worker])),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn centroids_that_would_hide_one_another_share_a_disc() {
        let got = groups(&[(0.0, 0.0), (40.0, 0.0), (10.0, 5.0), (40.0, 16.0), (80.0, 0.0)]);
        let workers: Vec<Vec<usize>> = got.into_iter().map(|(_, workers)| workers).collect();
        assert_eq!(workers, [vec![0, 2], vec![1, 3], vec![4]]);
    }
}
