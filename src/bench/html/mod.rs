//! A calibration's report as one page: figures drawn from `report.json` and nothing else.
//!
//! Never computes a number, loads anything from elsewhere, or needs a script.

mod batches;
mod clusters;
mod components;
mod head;
mod heat;
mod labels;
mod mask;
mod phases;
mod plot;
mod section;
mod svg;
mod tau;
mod text;
mod transforms;

use crate::figures::ReportData;
pub(super) use plot::ticks;
pub(super) use text::escape;

const STYLE: &str = include_str!("style.css");

/// The page, complete in itself. Equal data give equal bytes.
pub fn page(data: &ReportData) -> String {
    let sections = [
        heat::section(data),
        phases::section(data),
        batches::section(data),
        transforms::section(data),
        mask::section(data),
        clusters::section(data),
        components::section(data),
        tau::section(data),
    ];
    let figures: String = sections.iter().enumerate().map(|(at, section)| section.markup(at + 1)).collect();
    let title = escape(data.model.as_deref().unwrap_or(&data.fingerprint));
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>Calibration report: {title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n{}<main>\n{figures}</main>\n\
         <footer>All numbers are in <code>report.json</code>, from which this page is drawn.</footer>\n</body>\n</html>\n",
        head::markup(data)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{
        Extras, Figure,
        planted::{Planted, extras},
    };

    fn data() -> ReportData {
        Planted::default().report(extras())
    }

    /// Elements without an end tag.
    const VOID: [&str; 1] = ["meta"];

    /// Walks the markup's tags; panics where one does not close what was opened or an attribute has no quotes. Returns
    /// the values of all `id`s.
    fn check_well_formed(page: &str) -> Vec<String> {
        let rest = page.strip_prefix("<!doctype html>\n").expect("a doctype");
        let (mut open, mut ids) = (Vec::new(), Vec::new());
        for piece in rest.split('<').skip(1) {
            let (tag, text) = piece.split_once('>').unwrap_or_else(|| panic!("a tag never ends: {piece}"));
            assert!(!text.contains('>') || open.last() == Some(&"style"), "a stray > after <{tag}>: {text}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name), "</{name}>");
                continue;
            }
            let name = tag.split([' ', '/']).next().expect("a name");
            let attributes: Vec<&str> = tag[name.len()..].split('"').collect();
            assert_eq!(attributes.len() % 2, 1, "quotes of <{tag}>");
            for pair in attributes.chunks_exact(2) {
                assert!(pair[0].starts_with(' ') && pair[0].ends_with('='), "<{tag}>");
                if pair[0] == " id=" {
                    ids.push(pair[1].to_owned());
                }
            }
            if !tag.ends_with('/') && !VOID.contains(&name) {
                open.push(name);
            }
        }
        assert!(open.is_empty(), "never closed: {open:?}");
        ids
    }

    #[test]
    fn a_page_from_the_json_beside_it_is_the_same_page() {
        for data in [data(), Planted::default().report(Extras::default())] {
            let again = ReportData::from_json(&data.to_json()).expect("its own JSON");
            assert!(page(&again) == page(&data));
        }
    }

    #[test]
    fn the_page_is_well_formed_and_needs_nothing_else() {
        let page = page(&data());
        let mut ids = check_well_formed(&page);
        let n = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), n, "an id is used twice");
        for reference in page.split("aria-labelledby=\"").skip(1) {
            let (names, _) = reference.split_once('"').expect("a quote");
            assert!(names.split(' ').all(|name| ids.iter().any(|id| id == name)), "{names}");
        }
        for outside in
            ["http:", "https:", "<script", "<link", "<img", "src=", "url(", "@import", "NaN", "=\"inf", "-inf"]
        {
            assert!(!page.contains(outside), "{outside}");
        }
        assert_eq!(page.matches("<figure ").count(), 8);
        assert_eq!(page.matches("<details>").count(), 8);
        assert!(
            page.matches("<svg ").count() >= 9 && page.matches("role=\"img\"").count() == page.matches("<svg ").count()
        );
    }

    #[test]
    fn names_from_outside_never_become_markup() {
        let domains = vec!["</text><script>alert(1)</script>", "a & \"b\" 'c'", "\u{202e}olleh\0", "\u{4e2d}\u{6587}"];
        let mut extras = extras();
        let evil = "<img src=x onerror=\"y\">&lt;";
        extras.model = Some(evil.to_owned());
        extras.transforms[0].name = evil.to_owned();
        extras.tau.as_mut().expect("a curve").baseline = evil.to_owned();
        let verdict = extras.verdict.as_mut().expect("a verdict");
        verdict.sentence = evil.to_owned();
        verdict.numbers[0].name = evil.to_owned();
        let mut data = Planted { domains, ..Planted::default() }.report(extras);
        data.fingerprint = evil.to_owned();
        let page = page(&data);
        check_well_formed(&page);
        assert!(!page.contains("<img") && !page.contains("<script") && !page.contains('\0'));
        assert!(page.contains("&lt;img src=x onerror=&quot;y&quot;&gt;&amp;lt;"));
    }

    #[test]
    fn a_figure_without_data_is_left_out_with_the_reason() {
        let mut data = Planted { domains: vec!["only"], ..Planted::default() }.report(Extras::default());
        data.batches = Figure::LeftOut("no <steps>".to_owned());
        let page = page(&data);
        check_well_formed(&page);
        for why in [
            "no &lt;steps&gt;",
            "the transforms of the counts were not compared",
            "fewer than two labels",
            "no width was chosen",
        ] {
            assert!(page.contains(&format!("Left out: {why}")), "{why}");
        }
        assert!(page.contains("No verdict: the policies were not replayed"));
    }

    #[test]
    fn a_large_model_gives_a_small_page() {
        let domains = vec!["a", "b", "c", "d", "e", "f", "g", "h"];
        let data = Planted { domains, n_expert: 128, n_requests: 240, noise: 0.5 }.report(extras());
        assert!(page(&data).len() < 1_000_000, "{}", page(&data).len());
    }
}
