//! Rows as one HTML page.
//!
//! Never needs a script or anything from elsewhere.

use std::fmt::Write as _;

use super::{
    Rows,
    chart::{STYLE, elements},
    markdown::markdown,
};
use crate::bench::html::escape;

const PAGE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}\
table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.25rem .6rem;border-bottom:1px solid #8884;\
text-align:right;white-space:nowrap}td:first-child,th:first-child{text-align:left}figure{display:inline-block;width:min(100%,34rem);margin:0}";

/// The tables and the charts, complete in itself. Equal rows give equal bytes.
pub fn page(rows: &Rows) -> String {
    let mut charts = String::new();
    for chart in elements(rows) {
        let _ = writeln!(charts, "<figure>{chart}</figure>");
    }
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, \
         initial-scale=1\">\n<title>eldr report</title>\n<style>{PAGE}{STYLE}</style>\n</head>\n<body>\n<h1>eldr report</h1>\n{}\
         {charts}</body>\n</html>\n",
        tables(&markdown(rows))
    )
}

/// The Markdown that [`markdown`] writes, as HTML.
fn tables(text: &str) -> String {
    let mut out = String::new();
    let (mut in_table, mut in_list) = (false, false);
    for line in text.lines() {
        let cells = line.strip_prefix("| ").and_then(|rest| rest.strip_suffix(" |"));
        let is_rule = line.starts_with("| ---") || line.starts_with("|---");
        if is_rule {
            continue;
        }
        if in_table && cells.is_none() {
            out.push_str("</table>\n");
            in_table = false;
        }
        let item = line.strip_prefix("- ");
        if in_list && item.is_none() {
            out.push_str("</ul>\n");
            in_list = false;
        }
        if let Some(cells) = cells {
            let tag = if in_table { "td" } else { "th" };
            if !in_table {
                out.push_str("<table>\n");
                in_table = true;
            }
            let cells = cells.replace("\\|", "\u{0}");
            let cells =
                cells.split(" | ").map(|cell| format!("<{tag}>{}</{tag}>", escape(&cell.replace('\u{0}', "|"))));
            let _ = writeln!(out, "<tr>{}</tr>", cells.collect::<String>());
        } else if let Some(item) = item {
            if !in_list {
                out.push_str("<ul>\n");
                in_list = true;
            }
            let _ = writeln!(out, "<li>{}</li>", escape(item));
        } else if let Some(title) = line.strip_prefix("### ") {
            let _ = writeln!(out, "<h2>{}</h2>", escape(title));
        } else if !line.is_empty() {
            let _ = writeln!(out, "<p>{}</p>", escape(line));
        }
    }
    if in_table {
        out.push_str("</table>\n");
    }
    if in_list {
        out.push_str("</ul>\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::rows::tests::sample;

    #[test]
    fn tables_and_charts_are_on_the_page_and_names_are_no_markup() {
        let mut rows = sample();
        rows.notes = vec!["a<b".into()];
        let page = page(&rows);
        assert_eq!((page.matches("<tr>").count(), page.matches("<figure>").count()), (5, 3));
        assert!(
            page.contains("<li>a&lt;b</li>") && page.contains("<h2>simulate</h2>") && page.contains("<p>workers 8</p>")
        );
        for tag in ["table", "ul", "tr", "td", "figure", "svg"] {
            let (open, close) = (
                page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count(),
                page.matches(&format!("</{tag}>")).count(),
            );
            assert_eq!(open, close, "{tag}");
        }
        assert_eq!(page, super::page(&rows));
    }
}
