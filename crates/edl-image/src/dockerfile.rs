// SPDX-License-Identifier: Apache-2.0
//! Parses Dockerfiles, as far as they can be executed without running a command.

use std::collections::BTreeMap;

/// The steps of a Dockerfile, with all variables replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dockerfile {
    /// The image to start from; `scratch` is nothing.
    pub base: String,
    pub steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Copy {
        sources: Vec<String>,
        target: String,
    },
    Env(Vec<(String, String)>),
    Label(Vec<(String, String)>),
    User(String),
    WorkingDir(String),
    Entrypoint(Vec<String>),
    Cmd(Vec<String>),
    Expose(Vec<String>),
    /// Needs a tool that can run containers.
    Run(Needed),
}

/// A line that only a tool that runs containers can execute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needed {
    pub line: usize,
    pub text: String,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the Dockerfile has no FROM")]
    NoFrom,
    #[error("invalid line {line} of the Dockerfile, `{text}`: {why}")]
    Line { line: usize, text: String, why: &'static str },
}

/// The most text that all variables of a file may be replaced with. A line can use the one before
/// twice, so without a limit 40 lines would fill the memory.
const MAX_EXPANDED: usize = 1 << 16;
const TOO_LONG: &str = "the values of its variables are too long";

/// Reads a Dockerfile; `args` win over the defaults of its ARG lines.
pub fn parse(text: &str, args: &BTreeMap<String, String>) -> Result<Dockerfile, Error> {
    let mut variables = BTreeMap::new();
    let mut base = None;
    let mut steps = Vec::new();
    let mut left = MAX_EXPANDED;
    for (line, text) in lines(text) {
        let error = |why| Error::Line { line, text: text.clone(), why };
        let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((&text, ""));
        let rest = rest.trim();
        let mut expanded = |text: &str| {
            let expanded = expand(text, &variables, left).ok_or_else(|| error(TOO_LONG))?;
            left = left.saturating_sub(expanded.len().saturating_sub(text.len()));
            Ok::<_, Error>(expanded)
        };
        let needed = || Step::Run(Needed { line, text: text.clone() });
        let step = match word.to_ascii_uppercase().as_str() {
            "ARG" => {
                let (name, default) = rest.split_once('=').unwrap_or((rest, ""));
                let known = variables.get(name).cloned().unwrap_or_default();
                let default = words(&expanded(default)?).concat();
                let default = if default.is_empty() { known } else { default };
                let value = args.get(name).cloned().unwrap_or(default);
                variables.insert(name.to_owned(), value);
                continue;
            }
            "FROM" if base.is_none() => {
                let image =
                    words(&expanded(rest)?).into_iter().find(|word| !word.starts_with("--"));
                base = Some(image.ok_or_else(|| error("FROM requires an image"))?);
                continue;
            }
            // A second stage copies what the first one made by running a command.
            "FROM" | "RUN" | "ADD" => needed(),
            "COPY" if rest.starts_with("--") || rest.starts_with('[') => needed(),
            "COPY" => {
                let mut sources = words(&expanded(rest)?);
                let target = sources.pop().filter(|_| !sources.is_empty());
                Step::Copy {
                    target: target.ok_or_else(|| error("COPY requires SOURCE TARGET"))?,
                    sources,
                }
            }
            "ENV" => {
                let pairs =
                    pairs(&expanded(rest)?).ok_or_else(|| error("ENV requires NAME=VALUE"))?;
                variables.extend(pairs.iter().cloned());
                Step::Env(pairs)
            }
            "LABEL" => Step::Label(
                pairs(&expanded(rest)?).ok_or_else(|| error("LABEL requires NAME=VALUE"))?,
            ),
            "USER" => Step::User(expanded(rest)?),
            "WORKDIR" => Step::WorkingDir(expanded(rest)?),
            "ENTRYPOINT" => Step::Entrypoint(command(rest)),
            "CMD" => Step::Cmd(command(rest)),
            "EXPOSE" => Step::Expose(words(&expanded(rest)?)),
            _ => needed(),
        };
        if base.is_none() {
            return Err(error("FROM must come first"));
        }
        steps.push(step);
    }
    Ok(Dockerfile { base: base.ok_or(Error::NoFrom)?, steps })
}

impl Dockerfile {
    /// The first line that needs a tool.
    #[must_use]
    pub fn needs_tool(&self) -> Option<&Needed> {
        self.steps
            .iter()
            .find_map(|step| if let Step::Run(needed) = step { Some(needed) } else { None })
    }
}

/// Lines by their number, joined where one ends with a backslash, without comments.
fn lines(text: &str) -> Vec<(usize, String)> {
    let mut joined = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (start, before) = open.take().unwrap_or((index + 1, String::new()));
        match line.strip_suffix('\\') {
            Some(part) => open = Some((start, format!("{before}{part}"))),
            None => joined.push((start, format!("{before}{line}"))),
        }
    }
    joined.extend(open);
    joined
}

/// Replaces `$NAME`, `${NAME}` and `${NAME:-default}`; none if that adds more than `most` bytes.
fn expand(text: &str, variables: &BTreeMap<String, String>, most: usize) -> Option<String> {
    let value = |name: &str| variables.get(name).map_or("", String::as_str);
    let mut result = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        result.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        let (name, end) = match after.strip_prefix('{').and_then(|inner| inner.find('}')) {
            Some(end) => (&after[1..=end], end + 2),
            None => {
                let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
                let end = after.find(|c| !is_name(c)).unwrap_or(after.len());
                (&after[..end], end)
            }
        };
        let (name, default) = name.split_once(":-").unwrap_or((name, ""));
        match value(name) {
            "" if name.is_empty() => result.push('$'),
            "" => result.push_str(default),
            value => result.push_str(value),
        }
        if result.len() > text.len() + most {
            return None;
        }
        rest = &after[end..];
    }
    Some(result + rest)
}

/// Splits at white space outside quotes.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match (letter, quote) {
            ('\\', None | Some('"')) => {
                word.get_or_insert_default().extend(letters.next());
            }
            (letter, Some(open)) if letter == open => quote = None,
            ('"' | '\'', None) => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (letter, None) if letter.is_whitespace() => words.extend(word.take()),
            (letter, _) => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

/// `A=1 B="2 3"`, or the old form `A 1`.
fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let words = words(text);
    if words.first().is_some_and(|first| !first.contains('=')) {
        let (name, value) = text.split_once(char::is_whitespace)?;
        return Some(vec![(name.into(), value.trim().into())]);
    }
    let pair =
        |word: &String| word.split_once('=').map(|(name, value)| (name.into(), value.into()));
    words.iter().map(pair).collect::<Option<Vec<_>>>().filter(|pairs| !pairs.is_empty())
}

/// A list of words, or a line for the shell.
fn command(text: &str) -> Vec<String> {
    serde_json::from_str(text).unwrap_or_else(|_| vec!["/bin/sh".into(), "-c".into(), text.into()])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Dockerfile {
        parse(text, &BTreeMap::new()).unwrap()
    }

    #[test]
    fn variables_are_replaced_and_flags_win_over_defaults() {
        let text = "ARG BASE=scratch\nFROM ${BASE}\nARG DIR=/zoo\nENV A=$DIR/a B=\"b c\"\nCOPY x \\\n  ${A}/${NONE:-n}/\n";
        let file = parsed(text);
        assert_eq!(file.base, "scratch");
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(file.steps[0], Step::Env(vec![pair("A", "/zoo/a"), pair("B", "b c")]));
        let copy = Step::Copy { sources: vec!["x".into()], target: "/zoo/a/n/".into() };
        assert_eq!(file.steps[1], copy);
        let args = BTreeMap::from([pair("BASE", "python:3.12")]);
        assert_eq!(parse(text, &args).unwrap().base, "python:3.12");
    }

    #[test]
    fn what_must_be_run_is_named_by_its_line() {
        let file = parsed(
            "# all\nFROM a AS b\n\nUSER 1000\nRUN pip install \\\n  x\nCMD [\"a\", \"b\"]\n",
        );
        let needed = Needed { line: 5, text: "RUN pip install x".into() };
        assert_eq!(file.needs_tool(), Some(&needed));
        assert_eq!(file.steps[2], Step::Cmd(vec!["a".into(), "b".into()]));
        for text in
            ["FROM a\nFROM b", "FROM a\nADD x /", "FROM a\nCOPY --from=b x /", "FROM a\nSHELL x"]
        {
            assert_eq!(parsed(text).needs_tool().unwrap().line, 2, "{text}");
        }
    }

    #[test]
    fn variables_that_grow_without_end_are_refused() {
        for keyword in ["ARG", "ENV"] {
            let text = format!("FROM a\n{keyword} A=0123456789abcdef\n");
            let error =
                parse(&(text + &format!("{keyword} A=$A$A\n").repeat(40)), &BTreeMap::new());
            let error = error.unwrap_err().to_string();
            assert!(error.ends_with("the values of its variables are too long"), "{error}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_its_line() {
        let check = |text: &str| parse(text, &BTreeMap::new()).unwrap_err().to_string();
        assert_eq!(check("# nothing"), "the Dockerfile has no FROM");
        assert_eq!(
            check("USER 1"),
            "invalid line 1 of the Dockerfile, `USER 1`: FROM must come first"
        );
        assert!(check("FROM a\nCOPY b").contains("line 2"), "{}", check("FROM a\nCOPY b"));
        assert!(check("FROM a\nENV").contains("ENV requires NAME=VALUE"));
    }
}
