//! Tests of what patterns are translated to, and of what rules find.

use proptest::prelude::*;

use super::*;

fn python(c: char) -> CharClass {
    if c.is_numeric() {
        CharClass::Digit
    } else if c.is_alphabetic() {
        CharClass::Word
    } else {
        CharClass::Other
    }
}

fn search(rules: &RuleSet, path: &str) -> Found {
    rules.find(path, &mut python, &mut parallel::never).unwrap()
}

fn matches(patterns: &[&str], mode: MatchMode, path: &str) -> Vec<usize> {
    let rules = RuleSet::new(patterns, mode);
    let found = search(&rules, path);
    assert!(found.rest.is_empty(), "{path}: {:?} left over", found.rest);
    found.matches
}

#[test]
fn all_rules_that_match_are_found_in_order() {
    let patterns = ["kernel$", "dense", "bias", "^kernel", "dense_1.kernel"];
    assert_eq!(matches(&patterns, MatchMode::Search, "dense_1/kernel"), [0, 1, 4]);
    assert_eq!(matches(&patterns, MatchMode::Match, "dense_1/kernel"), [1, 4]);
    assert_eq!(matches(&patterns, MatchMode::FullMatch, "dense_1/kernel"), [4]);
    assert_eq!(matches(&patterns, MatchMode::Search, "conv"), [0_usize; 0]);
    assert_eq!(matches(&[], MatchMode::Search, "conv"), [0_usize; 0]);
}

#[test]
fn an_alternative_is_anchored_as_a_whole() {
    assert_eq!(matches(&["a|b"], MatchMode::FullMatch, "ab"), [0_usize; 0]);
    assert_eq!(matches(&["a|ab"], MatchMode::FullMatch, "ab"), [0]);
    assert_eq!(matches(&["x|(?:b)"], MatchMode::Match, "ab"), [0_usize; 0]);
    assert_eq!(matches(&["(?i)x|B"], MatchMode::FullMatch, "b"), [0]);
}

#[test]
fn the_end_is_also_before_a_last_newline_and_no_other() {
    assert_eq!(matches(&["a$", r"a\Z", "^a$", "a", "a$\n", r"a\s$"], MatchMode::Search, "a\n"), [0, 2, 3, 4, 5]);
    assert_eq!(matches(&["a$", "a$[^b]", r"a\n"], MatchMode::FullMatch, "a\n"), [1, 2]);
    // Beside the newline that `$` is before, those at which lines end, and what is not a boundary of words.
    let patterns = [r"$\B", r"-\B$", r"a\B$", "(?m:^b)$", "(?m:a$)\nb$", r"(?a)-\B$", r"$\n\B"];
    assert_eq!(matches(&patterns, MatchMode::Search, "\n"), [0, 6]);
    assert_eq!(matches(&patterns, MatchMode::Search, "-\n"), [0, 1, 5, 6]);
    assert_eq!(matches(&patterns, MatchMode::Search, "a\nb\n"), [0, 3, 4, 6]);
    let patterns = ["a$", "b$", "a.b", "(?s)a.b$", "a[^x]b", "(?m)a$", "(?m)^b", "^b", r"b\n"];
    assert_eq!(matches(&patterns, MatchMode::Search, "a\nb"), [1, 3, 4, 5, 6]);
    assert_eq!(matches(&patterns, MatchMode::Search, "a\nb\n"), [1, 3, 4, 5, 6, 8]);
}

#[test]
fn lines_and_a_last_newline_are_not_told_beside_a_carriage_return() {
    let rules = RuleSet::new(&["(?m:^b)$", "(?m)^b", "b$"], MatchMode::Search);
    let found = search(&rules, "a\r\nb\n");
    assert_eq!(found, Found { matches: vec![1, 2], rest: vec![0] });
}

#[test]
fn characters_beyond_ascii_are_what_the_caller_says() {
    // é is a word character, € is not; the engines agree on both. Of the sign ` ̈ ` they may differ.
    assert_eq!(matches(&[r"^\w$", r"^\W$", r"a\b", "^.$", "^[^a]$", "[a-z]"], MatchMode::Search, "é"), [0, 3, 4]);
    assert_eq!(matches(&[r"^\w$", r"^\W$"], MatchMode::Search, "€"), [1]);
    assert_eq!(matches(&["(?i)k", "(?ia)k", "(?i)[^k]"], MatchMode::Search, "\u{212a}"), [0]);
    // Between two bytes of é is not a place of the text.
    let patterns = [r"(?a)\B", r"(?a)\B$", r"(?a)é\B", r"(?a)\Bé", r"(?a)a\B"];
    assert_eq!(matches(&patterns, MatchMode::Search, "aéa"), [0_usize; 0]);
    assert_eq!(matches(&patterns, MatchMode::Search, "éé\n"), [0, 1, 2, 3]);
    // What ignores case in one part does not in another.
    for (letter, taken) in [("k", "\u{212a}"), ("s", "ſ"), ("i", "İ"), ("i", "ı")] {
        let patterns = [format!("(?i:a)|{letter}"), format!("(?i:a)|[^{letter}]"), format!("(?i:{letter})|a")];
        let patterns: Vec<&str> = patterns.iter().map(String::as_str).collect();
        assert_eq!(matches(&patterns, MatchMode::Search, taken), [1, 2], "{taken}");
    }
    assert_eq!(matches(&["é", r"é\w", "[à-ü]", "[^é]"], MatchMode::Search, "éü"), [0, 1, 2, 3]);
    let rules = RuleSet::new(&[r"é\W", r"\W"], MatchMode::Search);
    let mut class_of = |c| if c == 'é' { CharClass::Word } else { CharClass::Other };
    let found = rules.find("é\u{308}", &mut class_of, &mut parallel::never).unwrap();
    assert_eq!(found, Found { matches: vec![1], rest: vec![0] });
}

#[test]
fn a_rule_that_needs_backtracking_is_left_over() {
    let rules = RuleSet::new(&["a", r"\w", "(?=a)", "é", "(?i)a", r"(a)\1"], MatchMode::Search);
    assert_eq!(rules.backtracking(&mut parallel::never).unwrap(), [2, 5]);
    for (path, found) in
        [("a", &[0, 1, 4][..]), ("né", &[1, 3]), ("a\x1c", &[0, 1, 4]), ("", &[]), ("a\nb", &[0, 1, 4])]
    {
        let expected = Found { matches: found.to_vec(), rest: vec![2, 5] };
        assert_eq!(search(&rules, path), expected, "{path:?}");
    }
}

#[test]
fn the_first_printable_path_compiles_what_such_paths_need() {
    let rules = RuleSet::new(&["kernel"], MatchMode::Search);
    assert!(!rules.is_compiled_for("kernel"));
    // Other paths have automata of their own.
    assert_eq!(search(&rules, "é"), Found::default());
    assert!(!rules.is_compiled_for("kernel") && !rules.is_compiled_for("é"));
    assert_eq!(search(&rules, "bias"), Found::default());
    for (path, compiled) in
        [("kernel", true), (" ~", true), ("é", false), ("a\nb", false), ("\x7f", false), ("", false)]
    {
        assert_eq!(rules.is_compiled_for(path), compiled, "{path:?}");
    }
}

#[test]
fn a_rule_that_is_too_large_leaves_the_others_compiled() {
    let deep = format!("{}a{}", "(".repeat(5_000), ")".repeat(5_000));
    let rules = RuleSet::new(&["a", "((a{1000}){1000}){1000}", &deep, "b"], MatchMode::Search);
    assert_eq!(search(&rules, "ab"), Found { matches: vec![0, 3], rest: vec![1, 2] });
    assert_eq!(rules.backtracking(&mut parallel::never).unwrap(), [1, 2]);
}

#[test]
fn what_makes_python_backtrack_for_ever_comes_to_an_end() {
    let rules = [
        "(a+)+$",
        "(a|aa)+$",
        "(a|a?)+!",
        "(.*a){20}c",
        "([a-z]+)*!",
        "(x+x+)+y",
        r"(\w+)+$",
        "(?s)(a+)+$",
        "(?m)(a+)+%$",
    ];
    for path in ["a".repeat(40) + "b#", "a".repeat(10_000) + "€", "a".repeat(40) + "b€\n", "a".repeat(40) + "b\nc€"]
    {
        assert_eq!(matches(&rules, MatchMode::Search, &path), [0_usize; 0], "{path:?}");
    }
}

fn translated(pattern: &str) -> Option<String> {
    translate(pattern, Ending::Plain, true, Written::Matches).map(|(text, _)| text)
}

#[test]
fn what_both_syntaxes_have_is_written_anew() {
    for (python, rust) in [
        ("dense.*kernel", r"dense[^\n]*kernel"),
        (r"h\.\d+\.attn\.weight$", r"h\.[\d]+\.attn\.weight\z"),
        ("my model/a-b_c#1&~", r"my model\/a\-b\_c\#1\&\~"),
        (r"\Ah\[0\]\Z", r"\Ah\[0\]\z"),
        ("a]b}{", r"a\]b\}\{"),
        ("(a|b)(?:c)(?P<name>d)(?#no)", "(?:a|b)(?:c)(?:d)"),
        ("a*?b+?c??d{2}e{2,}?f{2,3}g{,4}h{,}", "a*b+c?d{2}e{2,}f{2,3}g{0,4}h{0,}"),
        ("a{}b{2, 3}", r"a\{\}b\{2\, 3\}"),
        ("[]a-c-]", r"[\]a-c\-]"),
        ("[^]^-]", r"[^\]\^\-]"),
        (r"[\w.\-+-/]", r"[[\w]\.\-\+-\/]"),
        ("[[a&&b||c~~d]", r"[\[a\&\&b\|\|c\~\~d]"),
        (r"\<a\>", "<a>"),
        ("(?i)Kb|[h-j_]", "[kK\u{212a}][bB]|[h-jH-Jİı\\_]"),
        ("(?i:k)k[s-]", "(?:[kK\u{212a}])k[s\\-]"),
        ("(?ia)k[^S]", "[kK][^Ss-s]"),
        ("(?ms)^a.$", "(?m:^)a(?s:.)(?m:$)"),
        ("(?x) a b # c\n [ #] \\  d", r"ab[ \#] d"),
        (r"\n\x41\u00e9[\t-\r]", r"\x0aAé[\x09-\x0d]"),
        ("poids_é", r"poids\_é"),
        ("", ""),
    ] {
        assert_eq!(translated(python).as_deref(), Some(rust), "{python}");
    }
    let marked = |pattern| translate(pattern, Ending::Marked, true, Written::Matches).map(|(text, _)| text);
    assert_eq!(marked("a$").as_deref(), Some("a(?m:$)"));
    assert_eq!(marked(r"[^a]\S\n").as_deref(), Some(r"(?:[^a]|(?-u:\xff))[^\s\x1c-\x1f](?:\x0a|(?-u:\xff))"));
}

#[test]
fn what_only_a_backtracking_search_finds_is_refused() {
    for pattern in [
        "(?=a)",
        "(?!a)",
        "(?<=a)",
        "(?<!a)",
        r"(a)\1",
        "(?P<n>a)(?P=n)",
        "(?>a)",
        "(a)?(?(1)b|c)",
        "(?a:b)",
        "(?L)a",
        "a*+",
        "a++",
        "a?+",
        "a{2}+",
        "a{2}{3}",
        r"\N{DIGIT ONE}",
        r"\0",
        r"\012",
        r"[\b]",
        r"[\d-z]",
        r"[a-\d]",
        r"\z",
        "[a",
        r"a\",
        "(?i)é",
    ] {
        assert_eq!(translated(pattern), None, "{pattern}");
    }
}

#[test]
fn where_a_pattern_is_searched_is_known() {
    let traits = |pattern| translate(pattern, Ending::Plain, true, Written::Matches).unwrap().1;
    let none = Traits::default();
    assert_eq!(traits(r"a.*[^b]\Z"), none);
    assert_eq!(traits("a$"), Traits { has_end: true, ..none });
    assert_eq!(traits("(?m)a$"), Traits { has_line: true, ..none });
    assert_eq!(traits("(?m:^)a$"), Traits { has_end: true, has_line: true, ..none });
    for pattern in [r"\d", r"[\s]", r"a\b"] {
        assert_eq!(traits(pattern), Traits { has_class: true, ..none }, "{pattern}");
    }
    assert_eq!(traits(r"(?a)\w"), none);
    assert_eq!(traits(r"\B"), Traits { has_class: true, has_not_boundary: true, ..none });
    assert_eq!(traits("x(?i:a)"), Traits { group: Group::Folded, ..none });
    assert_eq!(traits("(?ia)a"), none);
    assert_eq!(traits(r"é\w"), Traits { group: Group::Original, has_class: true, ..none });
}

proptest! {
    #[test]
    fn any_text_is_translated_or_refused(pattern in r"(?s)([\[\]()\\{}^$.|?*+\-:P<>,09azdwbZ\né]|.){0,40}") {
        let _ = translate(&pattern, Ending::Marked, true, Written::Matches);
    }
}
