//! The report as one SVG: time per output token and distinct experts, by policy.
//!
//! Draws only what the report holds; bars start at zero.

use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::bench::{BenchReport, Clock, table::percent};

const WIDTH: i32 = 880;
const MARGIN: i32 = 24;
/// Right of the longest bar: room for its value and change.
const VALUE_WIDTH: i32 = 160;
/// Above the first panel: title and subtitle.
const HEAD_HEIGHT: i32 = 72;
/// A panel's heading and the space below its last row.
const PANEL_HEIGHT: i32 = 58;
const BAR_HEIGHT: i32 = 14;
const ROW_GAP: i32 = 12;
/// Sizes of the title, a panel's heading, names and legends, and values, as plotters counts them (1.24 a pixel).
const TITLE: i32 = 21;
const HEADING: i32 = 18;
const NAME: i32 = 15;
const VALUE: i32 = 14;
/// What a character of a text of size 1 takes on average in a wide sans-serif.
const CHAR_WIDTH: f64 = 0.52;

const PAPER: RGBColor = RGBColor(0xff, 0xff, 0xff);
const INK: RGBColor = RGBColor(0x1f, 0x23, 0x28);
const FAINT: RGBColor = RGBColor(0x59, 0x63, 0x6e);
const BLUE: RGBColor = RGBColor(0x3b, 0x7d, 0xc4);
const AMBER: RGBColor = RGBColor(0xd0, 0x8a, 0x2e);
const GREEN: RGBColor = RGBColor(0x2e, 0x96, 0x7d);
/// On a dark page paper and ink change places; the bars' colours stand out on both.
const DARK: &str = "<style>@media (prefers-color-scheme: dark) { [fill=\"#FFFFFF\"] { fill: #0d1117 } \
     [fill=\"#1F2328\"] { fill: #e6edf3 } [fill=\"#59636E\"] { fill: #9198a1 } }</style>\n";

/// Why there is no chart.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChartError {
    /// The report has no runs.
    #[error("the report has no runs to draw; run a bench with at least one policy")]
    NoRuns,
    /// The drawing library failed.
    #[error("the chart could not be drawn: {0}")]
    Draw(String),
}

type Canvas<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// One bar of a row: how long, what colour, and its change against the best load balancer.
struct Bar {
    value: Option<f64>,
    change: Option<f64>,
    colour: RGBColor,
}

/// One panel: a heading, what each colour means, and one row of bars a policy.
struct Panel<'a> {
    heading: &'a str,
    unit: &'a str,
    legend: &'a [(&'a str, RGBColor)],
    rows: Vec<(&'a str, Vec<Bar>)>,
}

/// The chart as an SVG document of its own, for light and dark pages.
pub fn svg(report: &BenchReport) -> Result<String, ChartError> {
    if report.runs.is_empty() {
        return Err(ChartError::NoRuns);
    }
    let panels = [latency_panel(report), experts_panel(report)];
    let height = HEAD_HEIGHT + panels.iter().map(Panel::height).sum::<i32>();
    let mut document = String::new();
    {
        let canvas = SVGBackend::with_string(&mut document, (WIDTH as u32, height as u32)).into_drawing_area();
        draw(&canvas, report, &panels).map_err(|error| ChartError::Draw(error.to_string()))?;
    }
    let head = document.find('>').map_or(0, |end| end + 2);
    document.insert_str(head, DARK);
    Ok(document)
}

fn latency_panel(report: &BenchReport) -> Panel<'_> {
    let rows = report.runs.iter().zip(report.changes()).map(|(run, change)| {
        let tpot = run.tpot_ms;
        let p50 = Bar { value: tpot.map(|t| t.p50), change: change.tpot_p50, colour: BLUE };
        let p99 = Bar { value: tpot.map(|t| t.p99), change: change.tpot_p99, colour: AMBER };
        (run.policy.as_str(), vec![p50, p99])
    });
    Panel {
        heading: "Time per output token (TPOT)",
        unit: " ms",
        legend: &[("p50", BLUE), ("p99", AMBER)],
        rows: rows.collect(),
    }
}

fn experts_panel(report: &BenchReport) -> Panel<'_> {
    let rows = report.runs.iter().zip(report.changes()).map(|(run, change)| {
        (run.policy.as_str(), vec![Bar { value: run.experts_per_token, change: change.reads, colour: GREEN }])
    });
    Panel { heading: "Experts a layer read for each token", unit: "", legend: &[("mean", GREEN)], rows: rows.collect() }
}

impl Panel<'_> {
    fn height(&self) -> i32 {
        PANEL_HEIGHT + self.rows.iter().map(|(_, bars)| row_height(bars)).sum::<i32>()
    }
}

fn row_height(bars: &[Bar]) -> i32 {
    bars.iter().map(|_| BAR_HEIGHT).sum::<i32>() + ROW_GAP
}

fn draw(canvas: &Canvas<'_>, report: &BenchReport, panels: &[Panel<'_>]) -> Drawn {
    canvas.fill(&PAPER)?;
    let model = report.model.path.rsplit(['/', '\\']).next().unwrap_or_default();
    let inflated = if report.model.inflated { ", zero-padded expert rows" } else { "" };
    write(canvas, &fit(&format!("{model}{inflated}"), TITLE), (MARGIN, 28), TITLE, INK, HPos::Left)?;
    write(canvas, &fit(&subtitle(report), NAME), (MARGIN, 52), NAME, FAINT, HPos::Left)?;
    let mut top = HEAD_HEIGHT;
    for panel in panels {
        draw_panel(canvas, panel, top, report.has_load_balancer())?;
        top += panel.height();
    }
    canvas.present()
}

fn subtitle(report: &BenchReport) -> String {
    let clock = match report.clock {
        Clock::Real => "real clock",
        Clock::Virtual => "virtual clock",
    };
    let workers = format!("{} prefill and {} decode workers, {clock}", report.prefill, report.decode);
    let parts = [report.workload.as_deref(), Some(&workers), report.arrivals.as_deref()];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" - ")
}

fn draw_panel(canvas: &Canvas<'_>, panel: &Panel<'_>, top: i32, compares: bool) -> Drawn {
    let longest_name = panel.rows.iter().map(|(name, _)| text_width(name, NAME)).max().unwrap_or(0);
    let left = MARGIN + longest_name.min(WIDTH / 3) + 10;
    let full = f64::from(WIDTH - MARGIN - VALUE_WIDTH - left);
    let values = panel.rows.iter().flat_map(|(_, bars)| bars).filter_map(|bar| bar.value);
    let largest = values.fold(0.0, f64::max);

    write(canvas, panel.heading, (MARGIN, top + 14), HEADING, INK, HPos::Left)?;
    let mut x = MARGIN + text_width(panel.heading, HEADING) + 24;
    for &(meaning, colour) in panel.legend {
        canvas.draw(&Rectangle::new([(x, top + 8), (x + 12, top + 20)], colour.filled()))?;
        write(canvas, meaning, (x + 18, top + 14), NAME, FAINT, HPos::Left)?;
        x += 18 + text_width(meaning, NAME) + 16;
    }
    if compares {
        write(canvas, "(change from the best load balancer)", (x, top + 14), NAME, FAINT, HPos::Left)?;
    }

    let mut y = top + 34;
    for (name, bars) in &panel.rows {
        let middle = y + (row_height(bars) - ROW_GAP) / 2;
        write(canvas, name, (left - 10, middle), NAME, INK, HPos::Right)?;
        for bar in bars {
            let share = bar.value.filter(|_| largest > 0.0).map_or(0.0, |value| value / largest);
            let end = left + (share * full).round() as i32;
            canvas
                .draw(&Rectangle::new([(left, y + 1), (end.max(left + 1), y + BAR_HEIGHT - 1)], bar.colour.filled()))?;
            write(canvas, &label(bar, panel.unit), (end + 6, y + BAR_HEIGHT / 2), VALUE, INK, HPos::Left)?;
            y += BAR_HEIGHT;
        }
        y += ROW_GAP;
    }
    Ok(())
}

fn label(bar: &Bar, unit: &str) -> String {
    let Some(value) = bar.value else { return "not measured".to_owned() };
    let change = bar.change.map(|change| format!(" ({})", percent(Some(change))));
    let decimals = if value < 10.0 { 2 } else { 1 };
    format!("{value:.decimals$}{unit}{}", change.unwrap_or_default())
}

fn write(canvas: &Canvas<'_>, text: &str, at: (i32, i32), size: i32, colour: RGBColor, side: HPos) -> Drawn {
    let style = ("sans-serif", size).into_font().color(&colour).pos(Pos::new(side, VPos::Center));
    canvas.draw(&Text::new(text.to_owned(), at, style))
}

fn text_width(text: &str, size: i32) -> i32 {
    (text.chars().count() as f64 * f64::from(size) * CHAR_WIDTH).ceil() as i32
}

/// `text`, cut to the chart's width.
fn fit(text: &str, size: i32) -> String {
    let room = (f64::from(WIDTH - 2 * MARGIN) / (f64::from(size) * CHAR_WIDTH)) as usize;
    if text.chars().count() <= room {
        return text.to_owned();
    }
    text.chars().take(room - 3).chain("...".chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::sample;

    /// The value of attribute `name` of a tag.
    fn attribute<'a>(tag: &'a str, name: &str) -> Option<&'a str> {
        let start = tag.find(&format!(" {name}=\""))? + name.len() + 3;
        tag[start..].split('"').next()
    }

    fn number(tag: &str, name: &str) -> i32 {
        attribute(tag, name).and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in {tag}"))
    }

    fn tags<'a>(document: &'a str, name: &str) -> Vec<&'a str> {
        document.split('<').filter(|tag| tag.split([' ', '>']).next() == Some(name)).collect()
    }

    fn bars(document: &str, colour: &str) -> Vec<i32> {
        let of_colour = |tag: &&str| attribute(tag, "fill") == Some(colour);
        // The first is the legend's.
        tags(document, "rect").into_iter().filter(of_colour).skip(1).map(|tag| number(tag, "width")).collect()
    }

    #[test]
    fn bars_are_as_long_as_the_numbers() {
        let document = svg(&sample()).expect("a chart");
        let [p50, p99, experts] = ["#3B7DC4", "#D08A2E", "#2E967D"].map(|colour| bars(&document, colour));
        assert_eq!([p50.len(), p99.len(), experts.len()], [6; 3]);
        // 35 ms is the longest latency bar; 16 ms and 27 ms are the last row's.
        let longest = f64::from(p99[1]);
        for (bar, ms) in [(p50[5], 16.0), (p99[5], 27.0), (p50[0], 20.0)] {
            assert!((f64::from(bar) - longest * ms / 35.0).abs() <= 1.0, "{bar} of {longest} for {ms} ms");
        }
        assert!(experts[5] < experts[4] && experts[4] < experts[0]);
        assert!(document.contains("1.71 (-25.0%)") && document.contains("16.0 ms (-20.0%)"));
    }

    #[test]
    fn nothing_is_drawn_outside() {
        let mut report = sample();
        report.model.path = format!("/models/{}.gguf", "long-name-".repeat(40));
        report.workload = Some("w".repeat(300));
        report.runs[2].policy = "a_policy_with_a_rather_long_name".into();
        report.runs[3].tpot_ms = None;
        let document = svg(&report).expect("a chart");
        let height = number(tags(&document, "svg")[0], "height");
        for tag in tags(&document, "rect") {
            let (x, y) = (number(tag, "x"), number(tag, "y"));
            assert!(
                x >= 0 && y >= 0 && x + number(tag, "width") <= WIDTH && y + number(tag, "height") <= height,
                "{tag}"
            );
        }
        for tag in tags(&document, "text") {
            let content = tag.split_once('>').map_or("", |(_, content)| content.trim());
            let size = attribute(tag, "font-size").and_then(|size| size.parse::<f64>().ok()).expect("a size");
            let width = (content.chars().count() as f64 * size * 0.64).ceil() as i32;
            let (x, y) = (number(tag, "x"), number(tag, "y"));
            let from = if attribute(tag, "text-anchor") == Some("end") { x - width } else { x };
            assert!(from >= 0 && from + width <= WIDTH && (8..height - 8).contains(&y), "{content} at {from}, {y}");
        }
        assert!(document.contains("not measured"));
    }

    #[test]
    fn every_colour_of_text_and_paper_has_a_dark_one() {
        let document = svg(&sample()).expect("a chart");
        for tag in tags(&document, "text") {
            let fill = attribute(tag, "fill").expect("a colour");
            assert!(DARK.contains(&format!("[fill=\"{fill}\"]")), "{fill}");
        }
        assert!(document.find("<style>") < document.find("<rect"));
    }

    #[test]
    fn an_empty_report_is_refused() {
        let mut report = sample();
        report.runs.clear();
        assert!(matches!(svg(&report), Err(ChartError::NoRuns)));
    }
}
