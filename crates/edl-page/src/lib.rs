// SPDX-License-Identifier: Apache-2.0
//! What the pages of jobs and of the cluster share: head, style, small plots, helpers, and what a
//! page may load. A page is one file that needs no other. `http` serves it.

pub mod http;

const HEAD: &str = include_str!("head.html");
const STYLE: &str = include_str!("style.css");
const COMMON: &str = include_str!("common.js");
const PLOT: &str = include_str!("plot.js");

/// Headers of a page: it loads nothing from elsewhere, and must not be cached or framed.
pub const HEADERS: [(&str, &str); 5] = [
    ("content-type", "text/html; charset=utf-8"),
    (
        "content-security-policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
         connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-store"),
];

/// The parts of a page that are its own.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    pub title: &'static str,
    /// With places for the scripts: `/*COMMON*/`, `/*SCRIPT*/` and, if it can be frozen,
    /// `/*DATA*/`.
    pub body: &'static str,
    pub style: &'static str,
    pub script: &'static str,
}

impl Page {
    /// The whole page, with JSON in it if it is frozen.
    #[must_use]
    pub fn with(self, data: &str) -> String {
        // Within a script only `</` and `<!--` could end it.
        let data = data.replace('<', "\\u003c");
        let head = HEAD.replacen("/*TITLE*/", self.title, 1).replacen(
            "/*STYLE*/",
            &[STYLE, self.style].concat(),
            1,
        );
        let body = self
            .body
            .replacen("/*COMMON*/", &[COMMON, PLOT].concat(), 1)
            .replacen("/*SCRIPT*/", self.script, 1)
            .replacen("/*DATA*/", &data, 1);
        head + &body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_all_its_parts_and_its_data_ends_no_script() {
        let body = "<script>/*DATA*/</script><script>/*COMMON*/</script>\
                    <script>/*SCRIPT*/</script>";
        let page = Page { title: "its name", body, style: ".own{}", script: "own();" };
        let text = page.with("{\"a\":\"</script><b>\"}");
        for part in
            ["its name", STYLE, COMMON, PLOT, ".own{}", "own();", "{\"a\":\"\\u003c/script>"]
        {
            assert!(text.contains(part), "{part}");
        }
        assert!(!text.contains("<b>") && !text.contains("/*STYLE*/"), "{text}");
    }
}
