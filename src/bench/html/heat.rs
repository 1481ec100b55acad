//! The heat map of expert picks by label.
//!
//! Never colours by rank: a colour stands for a range of percentage points.

use super::{
    plot::WIDTH,
    section::{Section, Table},
    svg::Svg,
    text::{clip, escape, fixed, n_of, name},
};
use crate::figures::{ActivationLayer, Figure, ReportData};

const ID: &str = "picks";
const TITLE: &str = "Which experts each label picks";
const ROW: f64 = 17.0;
const LEFT: f64 = 78.0;
const TOP: f64 = 20.0;
/// Shades on each side of the mean.
const N_SHADES: usize = 4;
/// Experts named in the table for each label and layer.
const N_NAMED: usize = 5;

pub(super) fn section(data: &ReportData) -> Section {
    let activation = match &data.activation {
        Figure::Data(activation) => activation,
        Figure::LeftOut(why) => return Section::left_out(ID, TITLE, why),
    };
    let step = shade_step(&activation.layers);
    let mut drawings: Vec<String> =
        activation.layers.iter().enumerate().map(|(at, layer)| drawing(data, layer, step, at)).collect();
    drawings.push(legend(step));
    let mut table = Table::new(&["layer, label", "distance from the mean", "picked more than elsewhere", "less"]);
    for layer in &activation.layers {
        for (place, label) in data.labels.names.iter().enumerate() {
            let (more, less) = extremes(layer, place);
            let distance = format!("{} %", fixed(layer.distance[place] * 100.0, 1));
            table.rows.push(vec![format!("{}, {}", layer.layer, name(label)), distance, more, less]);
        }
    }
    let (furthest, distance) = activation
        .layers
        .iter()
        .map(|layer| (layer.layer, layer.distance.iter().sum::<f64>() / layer.distance.len().max(1) as f64))
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .unwrap_or_default();
    let mut notes = vec![
        "Each cell is an expert&rsquo;s share of a label&rsquo;s decode picks, less the mean of all labels&rsquo; shares. \
         Columns are ordered by the label that picks the expert most."
            .to_owned(),
    ];
    if activation.n_layers_left_out > 0 {
        let left_out = n_of(activation.n_layers_left_out, "more layer");
        notes.push(format!("The mask has {left_out}, chosen after these."));
    }
    if activation.n_experts_left_out > 0 {
        let left_out = n_of(activation.n_experts_left_out, "expert");
        notes.push(format!("{left_out} of each layer, those that differ least among labels, are not drawn."));
    }
    if data.labels.n_other_labels > 0 {
        notes.push(format!("{} are not drawn.", n_of(data.labels.n_other_labels, "rarer label")));
    }
    notes.push("The table names the experts that stand out most; <code>report.json</code> has all.".to_owned());
    let lead = format!(
        "Labels differ most in layer {furthest}: there a label has on average {} % of its picks elsewhere than the mean \
         of all.",
        fixed(distance * 100.0, 0)
    );
    Section { id: ID, title: TITLE, lead, note: notes.join(" "), drawings, table }
}

/// Percentage points a shade stands for, so that nearly all cells are below the darkest one's end.
fn shade_step(layers: &[ActivationLayer]) -> f64 {
    let mut sizes: Vec<f64> =
        layers.iter().flat_map(|layer| layer.deviation.iter().flatten()).map(|x| x.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    let high = sizes.get(sizes.len().saturating_sub(1) * 97 / 100).copied().unwrap_or(0.0).max(1e-4);
    // Two digits, so that the legend's numbers are those the colours follow.
    let rough = high / N_SHADES as f64;
    let unit = 10f64.powf(rough.log10().floor() - 1.0);
    (rough / unit).round() * unit
}

/// The shade of a deviation: 0 is the mean, up to 4 on either side.
fn shade(deviation: f64, step: f64) -> usize {
    ((deviation.abs() / step + 0.5).floor() as usize).min(N_SHADES)
}

fn drawing(data: &ReportData, layer: &ActivationLayer, step: f64, at: usize) -> String {
    let names = &data.labels.names;
    let height = TOP + ROW * names.len() as f64 + 18.0;
    let mut svg = Svg::new(WIDTH, height);
    svg.text("l", (0.0, 12.0), &format!("layer {}", layer.layer));
    let cell = ((WIDTH - LEFT) / layer.experts.len().max(1) as f64, ROW - 2.0);
    for (place, label) in names.iter().enumerate() {
        let y = TOP + ROW * place as f64;
        svg.text("t e", (LEFT - 8.0, y + 11.0), &clip(label, 12));
        svg.rect("zero", (LEFT, y), (WIDTH - LEFT, cell.1));
        for (sign, class) in [(-1.0, 'n'), (1.0, 'p')] {
            for depth in 1..=N_SHADES {
                let places: Vec<(f64, f64)> = layer.deviation[place]
                    .iter()
                    .enumerate()
                    .filter(|(_, x)| **x * sign > 0.0 && shade(**x, step) == depth)
                    .map(|(column, _)| (LEFT + cell.0 * column as f64, y))
                    .collect();
                svg.cells(&format!("{class}{depth}"), &places, cell);
            }
        }
    }
    svg.text("t e", (WIDTH, height - 4.0), &n_of(layer.experts.len(), "expert"));
    let title = format!("Deviation of expert picks by label, layer {}", layer.layer);
    let distances: Vec<String> = names
        .iter()
        .zip(&layer.distance)
        .map(|(label, distance)| format!("{label} {} %", fixed(distance * 100.0, 0)))
        .collect();
    let description = format!("Share of each label's picks elsewhere than the mean: {}.", distances.join(", "));
    svg.finish(&format!("{ID}-{at}"), &title, &description)
}

fn legend(step: f64) -> String {
    let mut svg = Svg::new(WIDTH, 40.0);
    let width = 30.0;
    let first = LEFT;
    for shade in 0..=2 * N_SHADES {
        let x = first + width * shade as f64;
        let depth = shade.abs_diff(N_SHADES);
        let class = match shade.cmp(&N_SHADES) {
            std::cmp::Ordering::Less => format!("n{depth}"),
            std::cmp::Ordering::Equal => "zero".to_owned(),
            std::cmp::Ordering::Greater => format!("p{depth}"),
        };
        svg.rect(&class, (x, 2.0), (width - 2.0, 10.0));
        let points = step * 100.0 * (shade as f64 - N_SHADES as f64);
        let digits = if step < 0.0025 { 2 } else { 1 };
        let sign = if points > 0.0 { "+" } else { "" };
        svg.text("t m", (x + width / 2.0 - 1.0, 24.0), &format!("{sign}{}", fixed(points, digits)));
    }
    svg.text("t", (first, 37.0), "percentage points from the mean share");
    svg.finish(&format!("{ID}-scale"), "Colours of the heat maps", "Blue is below the mean share, orange above it.")
}

/// The experts that deviate most upwards and downwards.
fn extremes(layer: &ActivationLayer, place: usize) -> (String, String) {
    let mut columns: Vec<usize> = (0..layer.experts.len()).collect();
    columns.sort_by(|&a, &b| layer.deviation[place][b].total_cmp(&layer.deviation[place][a]));
    let list = |columns: &mut dyn Iterator<Item = &usize>, sign: f64| -> String {
        let named: Vec<String> = columns
            .take(N_NAMED)
            .filter(|&&column| layer.deviation[place][column] * sign > 0.0)
            .map(|&column| {
                let points = layer.deviation[place][column] * 100.0;
                let plus = if points > 0.0 { "+" } else { "" };
                format!("{} ({plus}{})", layer.experts[column], fixed(points, 1))
            })
            .collect();
        escape(&named.join(", "))
    };
    (list(&mut columns.iter(), 1.0), list(&mut columns.iter().rev(), -1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shades_follow_the_legend() {
        assert_eq!([0.0, 0.004, 0.006, -0.011, -0.5].map(|x| shade(x, 0.01)), [0, 0, 1, 1, 4]);
    }

    #[test]
    fn nearly_all_cells_are_below_the_darkest_shades_end() {
        let row: Vec<f64> = (0..100).map(|x| f64::from(x) / 1000.0).collect();
        let layer =
            ActivationLayer { layer: 0, experts: (0..100).collect(), deviation: vec![row], distance: vec![0.1] };
        assert!((shade_step(&[layer]) - 0.024).abs() < 1e-12);
        assert!(shade_step(&[]) > 0.0);
    }
}
