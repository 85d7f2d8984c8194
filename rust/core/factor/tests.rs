//! Tests of the factor rules of ops.

use super::*;

fn dims<'a>(name: &'a str, dims: &[i64]) -> (&'a str, Attribute) {
    (name, Attribute::Integers(dims.to_vec()))
}

#[test]
fn a_product_has_a_factor_for_each_index() {
    let given = [
        dims("lhs_batching_dimensions", &[0]),
        dims("rhs_batching_dimensions", &[0]),
        dims("lhs_contracting_dimensions", &[2]),
        dims("rhs_contracting_dimensions", &[1]),
    ];
    let product = rule("dot_general", &[&[2, 3, 5], &[2, 5, 7]], &[&[2, 3, 7]], &Attributes(given.to_vec())).unwrap();
    assert_eq!(product.to_string(), "([i,j,l],[i,l,k])->([i,j,k])");
    assert_eq!(product.factors().iter().map(|factor| factor.size).collect::<Vec<_>>(), [2, 3, 7, 5]);
    assert_eq!(product.factors()[3].kind, Kind::Sum);
}

#[test]
fn a_reshape_has_the_factors_that_both_shapes_have() {
    let text = |from: &[i64], to: &[i64]| rule("reshape", &[from], &[to], &Attributes::default()).unwrap().to_string();
    assert_eq!(text(&[8, 24], &[2, 4, 24]), "([ij,k])->([i,j,k])");
    assert_eq!(text(&[6], &[2, 3]), "([ij])->([i,j])");
    assert_eq!(text(&[2, 3], &[3, 2]), "([i,k])->([j,l])");
    assert_eq!(text(&[4, 1, 2], &[8]), "([i,j,k])->([ik])");
    assert_eq!(text(&[0, 3], &[0]), "([i,j])->([k])");
}

#[test]
fn what_is_no_such_op_is_refused() {
    let refused = |op: &str, operands: &[&[i64]], results: &[&[i64]]| {
        rule(op, operands, results, &Attributes::default()).unwrap_err().to_string()
    };
    assert_eq!(
        refused("tanhh", &[&[2]], &[&[2]]),
        "op \"tanhh\": no rule is known for it; did you mean \"tanh\"?; give one as a `FactorRule`"
    );
    assert!(refused("add", &[&[2], &[3]], &[&[2]]).contains("operands[1] has the shape [3]"));
    assert!(refused("reshape", &[&[6]], &[&[4]]).contains("has 6 elements"));
    assert!(refused("transpose", &[&[2, 3]], &[&[3, 2]]).contains("`permutation` is []"));
    assert!(refused("slice", &[&[2]], &[&[1]]).contains("attribute `start_indices` is missing"));
}

#[test]
fn the_text_of_a_rule_gives_the_rule_again() {
    for text in ["([i,k],[k,j])->([i,j])", "([],[i])->([i])", "([ij,k])->([i,j,k],[ijk])", "()->([i])", "([i])->([])"] {
        let rule = Rule::parse(text, &[], &[], &[], Reduction::Add, &[]).unwrap();
        let again = Rule::parse(&rule.to_string(), &[], &[], &[], Reduction::Add, &[]).unwrap();
        assert_eq!(rule, again, "{text}");
    }
    for text in
        ["", "(i)->(i)", "([i])", "([i_])->([i])", "([i,])->([i])", "([1])->([i])", "([i])->()", "([ii])->([i])"]
    {
        assert!(Rule::parse(text, &[], &[], &[], Reduction::Add, &[]).is_err(), "{text}");
    }
}

#[test]
fn sizes_follow_from_shapes() {
    let parse = |text: &str, kinds: &[(&str, Kind)], sizes: &[(&str, i64)]| {
        Rule::parse(text, kinds, &[], sizes, Reduction::Add, &[]).unwrap()
    };
    let product = parse("([i,k],[k,j])->([i,j])", &[("k", Kind::Sum)], &[]);
    let sized = product.sized(&[&[2, 3], &[3, 5], &[2, 5]]).unwrap();
    assert_eq!(sized.factors().iter().map(|factor| factor.size).collect::<Vec<_>>(), [2, 3, 5]);
    assert!(product.sized(&[&[2, 3], &[4, 5], &[2, 5]]).is_err());
    assert!(product.sized(&[&[2, 3], &[3, 5]]).is_err());
    // The size of `i` follows from the result, that of `j` from the operand and `i`.
    let split = parse("([ij])->([i,j])", &[], &[]);
    assert_eq!(split.sized(&[&[6], &[2, 3]]).unwrap().factors()[1].size, 3);
    let flat = parse("([ij])->([ij])", &[], &[]);
    assert!(flat.sized(&[&[6], &[6]]).unwrap_err().to_string().contains("give `sizes`"));
    assert!(parse("([ij])->([ij])", &[], &[("i", 4)]).sized(&[&[6], &[6]]).is_err());
}
