"""Writes mathematics problems with their worked solutions, every number computed here.

It never writes a number that it did not compute, and never gives both sets of prompts the same wording.

A kind of problem is a function `kind(half, r)` that returns a question and its solution; `half` (0 or 1) picks the
wording and `r` is the random generator.
"""

from fractions import Fraction
from math import comb, gcd, isqrt

PEOPLE = [
    "Amir Bea Carlos Dilan Esther Fiona Gustav Hana Igor Jill Kofi Linh Mateo Noor".split(),
    "Oscar Pia Quinn Rafael Selma Theo Ulla Viktor Wendy Xavier Yara Zeno Agnes Bruno".split(),
]
GOODS = [
    "pears mugs buttons lemons bricks plates scarves tiles ropes masks".split(),
    "melons spoons beads jars planks bowls gloves hooks kites lamps".split(),
]


def signed(value, unit=""):
    """'+ 3x' or '- 3x'."""
    return f"{'+' if value >= 0 else '-'} {abs(value)}{unit}"


def decimal(value, places=2):
    """A fraction as an exact decimal number when it has one, else rounded half up."""
    scaled = value * 10**places
    whole = (2 * scaled.numerator + scaled.denominator) // (2 * scaled.denominator)
    sign, whole = ("-" if whole < 0 else ""), abs(whole)
    return f"{sign}{whole // 10**places}.{whole % 10**places:0{places}d}"


def percent_rise(half, r):
    who, price, rate = r.choice(PEOPLE[half]), r.randint(12, 480), r.choice([4, 6, 8, 12, 15, 18, 22, 35])
    rise = Fraction(price * rate, 100)
    ask = (f"The rent of {who}'s garage is {price} euros a month. It goes up by {rate} percent. What is the new rent?",
           f"{who} sells a bicycle part for {price} dollars and then raises the price by {rate}%. Find the price after the rise.")[half]
    return ask, (f"The rise is {rate} / 100 * {price} = {decimal(rise)}.\nAdd it to the old value: {price} + {decimal(rise)} = "
                 f"{decimal(price + rise)}.\nAnswer: {decimal(price + rise)}")


def packing(half, r):
    who, goods, box, count = r.choice(PEOPLE[half]), r.choice(GOODS[half]), r.randint(6, 24), r.randint(70, 950)
    full, rest = divmod(count, box)
    ask = (f"{who} shares {count} {goods} among {box} baskets. How many {goods} are in each basket and how many remain?",
           f"{who} has {count} {goods} and buys boxes for {box} {goods} each. How many boxes are full and how many {goods} are left?")[half]
    return ask, (f"Divide with remainder: {count} = {full} * {box} + {rest}.\nThe check is {full} * {box} = {full * box} and "
                 f"{full * box} + {rest} = {count}.\nAnswer: {full}, and {rest} left")


def linear_both_sides(half, r):
    x, a, c = r.randint(-9, 14), r.randint(5, 13), r.randint(-4, 4)
    b = r.randint(-25, 25)
    d = a * x + b - c * x
    ask = (f"Find x when {a}x {signed(b)} = {c}x {signed(d)}.",
           f"For which value of x are {a}x {signed(b)} and {c}x {signed(d)} equal?")[half]
    return ask, (f"Bring the terms with x to the left: ({a} - ({c}))x = {d} - ({b}).\nThis gives {a - c}x = {d - b}.\n"
                 f"Divide by {a - c}: x = {d - b} / {a - c} = {x}.\nAnswer: x = {x}")


def mixture(half, r):
    v, w, p, q = r.randint(2, 15), r.randint(2, 15), r.randint(5, 30), r.randint(35, 80)
    salt = Fraction(v * p + w * q, 100)
    share = 100 * salt / (v + w)
    ask = (f"{v} litres of a {p}% acid are poured into {w} litres of a {q}% acid. How strong is the mixture?",
           f"A cook stirs {v} kg of syrup with {p} percent sugar into {w} kg of syrup with {q} percent sugar. What part is sugar now?")[half]
    return ask, (f"First part: {v} * {p} / 100 = {decimal(Fraction(v * p, 100))}.\nSecond part: {w} * {q} / 100 = {decimal(Fraction(w * q, 100))}.\n"
                 f"Sum: {decimal(salt)} in {v + w} units.\nShare: 100 * {decimal(salt)} / {v + w} = {decimal(share)} percent.\nAnswer: {decimal(share)}%")


def geometric_sequence(half, r):
    a, q, n = r.randint(1, 9), r.randint(2, 4), r.randint(4, 7)
    total = a * (q**n - 1) // (q - 1)
    ask = (f"A geometric sequence begins with {a} and has the ratio {q}. Give its term number {n} and the sum up to it.",
           f"A colony of {a} cells grows by the factor {q} every day. How many cells are there on day {n}, and what is the total over the {n} days?")[half]
    terms = ", ".join(str(a * q**i) for i in range(n))
    return ask, (f"The terms are {terms}.\nTerm {n} is {a} * {q}^{n - 1} = {a * q ** (n - 1)}.\nThe sum is {a} * ({q}^{n} - 1) / ({q} - 1) = "
                 f"{a} * {q**n - 1} / {q - 1} = {total}.\nAnswer: {a * q ** (n - 1)} and {total}")


def quadratic_formula(half, r):
    a, p, q = r.randint(2, 5), r.randint(-8, 8), r.randint(-8, 8)
    b, c = -a * (p + q), a * p * q
    disc = b * b - 4 * a * c
    low, high = min(p, q), max(p, q)
    ask = (f"Use the quadratic formula on {a}x^2 {signed(b, 'x')} {signed(c)} = 0.",
           f"Where does the parabola y = {a}x^2 {signed(b, 'x')} {signed(c)} meet the x-axis?")[half]
    return ask, (f"The discriminant is ({b})^2 - 4 * {a} * ({c}) = {disc}, and its square root is {isqrt(disc)}.\n"
                 f"x = ({-b} - {isqrt(disc)}) / {2 * a} = {low} and x = ({-b} + {isqrt(disc)}) / {2 * a} = {high}.\n"
                 f"Answer: x = {low} and x = {high}")


def least_multiple(half, r):
    a, b = r.randint(6, 48), r.randint(6, 48)
    g = gcd(a, b)
    ask = (f"What is the least common multiple of {a} and {b}?",
           f"Two lights blink every {a} and every {b} seconds. They blink together now. After how many seconds do they do so again?")[half]
    return ask, f"The greatest common divisor of {a} and {b} is {g}.\nSo the multiple is {a} * {b} / {g} = {a * b} / {g} = {a * b // g}.\nAnswer: {a * b // g}"


def base_conversion(half, r):
    n, base = r.randint(20, 900), r.choice([2, 3, 5, 7, 8])
    rows, digits, m = [], "", n
    while m:
        rows.append(f"{m} = {m // base} * {base} + {m % base}")
        digits, m = str(m % base) + digits, m // base
    ask = (f"Write the number {n} in base {base}.", f"Compute the digits of {n} in base {base}.")[half]
    return ask, f"Divide by {base} and keep the remainders:\n" + "\n".join(rows) + f"\nRead them from below: {digits}.\nAnswer: {digits}"


def modular_power(half, r):
    a, n, m = r.randint(2, 12), r.randint(4, 9), r.randint(7, 31)
    rows, v = [], 1
    for i in range(1, n + 1):
        rows.append(f"{a}^{i} = {v} * {a} = {v * a} = {v * a % m} (mod {m})")
        v = v * a % m
    ask = (f"Find the remainder of {a}^{n} on division by {m}.", f"Compute {a}^{n} modulo {m}.")[half]
    return ask, "Multiply and reduce after each step:\n" + "\n".join(rows) + f"\nAnswer: {v}"


def triangle_area(half, r):
    b, h = r.randint(4, 60), r.randint(3, 45)
    area = Fraction(b * h, 2)
    ask = (f"A triangle has a base of {b} cm and a height of {h} cm. What is its area?",
           f"A sail has the shape of a triangle with base {b} dm and height {h} dm. How much cloth does it need?")[half]
    return ask, f"The area is base * height / 2 = {b} * {h} / 2 = {b * h} / 2 = {decimal(area, 1)}.\nAnswer: {decimal(area, 1)}"


def prism_volume(half, r):
    a, b, c = r.randint(2, 25), r.randint(2, 25), r.randint(2, 25)
    surface = 2 * (a * b + a * c + b * c)
    ask = (f"A box measures {a} by {b} by {c} cm. Compute its volume and its surface.",
           f"How much water fits into a trough of {a} dm, {b} dm and {c} dm, and what is the area of all six faces of such a block?")[half]
    return ask, (f"Volume: {a} * {b} * {c} = {a * b * c}.\nFaces: {a} * {b} = {a * b}, {a} * {c} = {a * c}, {b} * {c} = {b * c}.\n"
                 f"Surface: 2 * ({a * b} + {a * c} + {b * c}) = {surface}.\nAnswer: volume {a * b * c}, surface {surface}")


def hypotenuse(half, r):
    m, n = r.choice([(2, 1), (3, 2), (4, 1), (4, 3), (5, 2)])
    k = r.randint(1, 9)
    a, b, c = k * (m * m - n * n), k * 2 * m * n, k * (m * m + n * n)
    ask = (f"The legs of a right triangle are {a} and {b}. How long is the third side?",
           f"A ladder stands {a} m from a wall and reaches {b} m high. How long is the ladder?")[half]
    return ask, f"{a}^2 + {b}^2 = {a * a} + {b * b} = {c * c}.\nThe square root of {c * c} is {c}.\nAnswer: {c}"


def line_through_points(half, r):
    x, y, dx, m = r.randint(-8, 8), r.randint(-9, 9), r.randint(1, 6), r.randint(-5, 6)
    b = y - m * x
    ask = (f"Give the equation of the line through ({x}, {y}) and ({x + dx}, {y + m * dx}).",
           f"A straight line passes through the points P({x}, {y}) and Q({x + dx}, {y + m * dx}). Find its slope and intercept.")[half]
    return ask, (f"Slope: ({y + m * dx} - ({y})) / ({x + dx} - ({x})) = {m * dx} / {dx} = {m}.\nIntercept: {y} - ({m}) * ({x}) = {b}.\n"
                 f"Answer: y = {m}x {signed(b)}")


def derivative_of_cubic(half, r):
    a, b, c, x = r.randint(2, 6), r.randint(-7, 7), r.randint(-9, 9), r.randint(-3, 4)
    value = 3 * a * x * x + 2 * b * x + c
    ask = (f"Let g(x) = {a}x^3 {signed(b, 'x^2')} {signed(c, 'x')}. Find g'({x}).",
           f"What is the slope of the curve y = {a}x^3 {signed(b, 'x^2')} {signed(c, 'x')} at x = {x}?")[half]
    return ask, (f"Differentiate term by term: {3 * a}x^2 {signed(2 * b, 'x')} {signed(c)}.\nPut in x = {x}: {3 * a} * {x * x} {signed(2 * b)} * ({x}) {signed(c)} = "
                 f"{3 * a * x * x} {signed(2 * b * x)} {signed(c)} = {value}.\nAnswer: {value}")


def definite_integral(half, r):
    a, b, t = r.randint(2, 6) * 2, r.randint(1, 9), r.randint(1, 6)
    value = a // 2 * t * t + b * t
    ask = (f"Integrate {a}x + {b} from 0 to {t}.", f"Find the area under the line y = {a}x + {b} between x = 0 and x = {t}.")[half]
    return ask, (f"An antiderivative is {a // 2}x^2 + {b}x.\nAt {t}: {a // 2} * {t * t} + {b} * {t} = {a // 2 * t * t} + {b * t} = {value}.\nAt 0 it is 0.\nAnswer: {value}")


def choose(half, r):
    n, k = r.randint(5, 12), r.randint(2, 4)
    top = " * ".join(str(n - i) for i in range(k))
    low = " * ".join(str(i) for i in range(k, 0, -1))
    ask = (f"In how many ways can a team of {k} be chosen from {n} players?",
           f"How many different sets of {k} cards can be taken from {n} cards?")[half]
    return ask, f"The number is {top} / ({low}).\nThis is {comb(n, k)}.\nAnswer: {comb(n, k)}"


def dice(half, r):
    target = r.randint(4, 10)
    pairs = [(i, target - i) for i in range(1, 7) if 1 <= target - i <= 6]
    chance = Fraction(len(pairs), 36)
    ask = (f"Two dice are thrown. How likely is the sum {target}?",
           f"What is the probability that two fair dice show {target} points in total?")[half]
    listed = ", ".join(f"({i}, {j})" for i, j in pairs)
    return ask, f"The pairs with sum {target} are {listed}.\nThese are {len(pairs)} of 36 pairs: {len(pairs)}/36 = {chance}.\nAnswer: {chance}"


def spread(half, r):
    v = [r.randint(2, 40) for _ in range(5)]
    mean = Fraction(sum(v), 5)
    var = sum((x - mean) ** 2 for x in v) / 5
    ask = (f"Compute the variance of {', '.join(map(str, v))}.",
           f"Five measurements are {', '.join(map(str, v))}. Find their mean and their variance.")[half]
    squares = " + ".join(decimal((x - mean) ** 2) for x in v)
    return ask, f"Mean: {' + '.join(map(str, v))} = {sum(v)} and {sum(v)} / 5 = {decimal(mean)}.\nSquared distances: {squares}.\nVariance: {decimal(var)}.\nAnswer: {decimal(var)}"


def matrix_product(half, r):
    a, b, c, d, e, f = (r.randint(-6, 9) for _ in range(6))
    ask = (f"Multiply the matrix [[{a}, {b}], [{c}, {d}]] by the vector ({e}, {f}).",
           f"Apply the linear map with rows ({a}, {b}) and ({c}, {d}) to the point ({e}, {f}).")[half]
    x, y = a * e + b * f, c * e + d * f
    return ask, (f"First row: {a} * ({e}) + ({b}) * ({f}) = {a * e} {signed(b * f)} = {x}.\nSecond row: {c} * ({e}) + ({d}) * ({f}) = {c * e} {signed(d * f)} = {y}.\n"
                 f"Answer: ({x}, {y})")


def mixed_fractions(half, r):
    a, b, c, d = r.randint(1, 11), r.randint(2, 12), r.randint(1, 11), r.randint(2, 12)
    product = Fraction(a, b) * Fraction(c, d)
    ask = (f"Multiply {a}/{b} by {c}/{d} and reduce the result.", f"What is {a}/{b} of {c}/{d}? Give a reduced fraction.")[half]
    return ask, (f"Multiply above and below: {a} * {c} = {a * c} and {b} * {d} = {b * d}.\nThe common factor of {a * c} and {b * d} is {gcd(a * c, b * d)}.\n"
                 f"Reduced: {product}.\nAnswer: {product}")


def inequality(half, r):
    a, b, x = r.randint(2, 9), r.randint(-20, 20), r.randint(-6, 12)
    c = a * x + b
    ask = (f"For which x is {a}x {signed(b)} > {c}?", f"Solve the inequality {a}x {signed(b)} <= {c}.")[half]
    sign = (">", "<=")[half]
    return ask, f"Subtract ({b}): {a}x {sign} {c - b}.\nDivide by {a}, which is positive: x {sign} {x}.\nAnswer: x {sign} {x}"


def long_sum(half, r):
    v = [r.randint(100, 999) for _ in range(r.randint(3, 5))]
    rows, total = [], v[0]
    for x in v[1:]:
        rows.append(f"{total} + {x} = {total + x}")
        total += x
    goods = r.choice(GOODS[half])
    ask = (f"Add up {', '.join(map(str, v))} one after another.", f"A warehouse received {', '.join(map(str, v))} {goods}. How many are there in all?")[half]
    return ask, "\n".join(rows) + f"\nAnswer: {total}"


def sum_of_fractions(half, r):
    a, b, c, d = r.randint(1, 15), r.randint(2, 12), r.randint(1, 15), r.randint(2, 12)
    m = b * d // gcd(b, d)
    total = Fraction(a, b) + Fraction(c, d)
    ask = (f"Add the fractions {a}/{b} and {c}/{d}.", f"Compute {a}/{b} + {c}/{d} as a reduced fraction.")[half]
    return ask, (f"The least common denominator of {b} and {d} is {m}.\n{a}/{b} = {a * m // b}/{m} and {c}/{d} = {c * m // d}/{m}.\n"
                 f"{a * m // b}/{m} + {c * m // d}/{m} = {a * m // b + c * m // d}/{m}.\nReduced: {total}.\nAnswer: {total}")


def elimination(half, r):
    x, y, a, b, k = r.randint(-7, 9), r.randint(-7, 9), r.randint(1, 6), r.randint(1, 6), r.randint(2, 5)
    e, c, d = a * x + b * y, k * a, k * b + r.randint(1, 4)
    f = c * x + d * y
    ask = (f"Solve by elimination: {a}x + {b}y = {e}, {c}x + {d}y = {f}.",
           f"Find x and y if {a}x + {b}y = {e} and {c}x + {d}y = {f}.")[half]
    return ask, (f"Multiply the first equation by {k}: {c}x + {k * b}y = {k * e}.\nSubtract it from the second: {d - k * b}y = {f} - ({k * e}) = {f - k * e}.\n"
                 f"So y = {f - k * e} / {d - k * b} = {y}.\nPut in: {a}x = {e} - ({b * y}) = {a * x}, so x = {a * x} / {a} = {x}.\nAnswer: x = {x}, y = {y}")


def euclid(half, r):
    g = r.randint(2, 24)
    u, v = g * r.randint(11, 45), g * r.randint(4, 30)
    rows, a, b = [], u, v
    while b:
        rows.append(f"{a} = {a // b} * {b} + {a % b}")
        a, b = b, a % b
    ask = (f"Compute gcd({u}, {v}).", f"By which largest number can both {u} and {v} be divided?")[half]
    return ask, "Divide with remainder until nothing is left:\n" + "\n".join(rows) + f"\nAnswer: gcd({u}, {v}) = {a}"


def prime_factors(half, r):
    n = r.randint(60, 3000)
    rows, factors, m, p = [], [], n, 2
    while m > 1:
        while m % p == 0:
            rows.append(f"{m} / {p} = {m // p}")
            factors.append(str(p))
            m //= p
        p += 1
    ask = (f"Find the prime factors of {n}.", f"Decompose {n} into primes.")[half]
    return ask, "Try the primes in order:\n" + "\n".join(rows) + f"\nAnswer: {n} = {' * '.join(factors)}"


def long_product(half, r):
    a, b = r.randint(101, 998), r.randint(12, 99)
    tens, ones = b // 10 * 10, b % 10
    ask = (f"Multiply {a} by {b}.", f"What is {a} * {b}?")[half]
    return ask, (f"{a} * {tens} = {a * tens}.\n{a} * {ones} = {a * ones}.\n{a * tens} + {a * ones} = {a * b}.\nAnswer: {a * b}")


def brackets(half, r):
    a, b, c, d = r.randint(2, 19), r.randint(2, 19), r.randint(2, 9), r.randint(2, 12)
    value = c * (a + b) - d * d
    ask = (f"Compute {c} * ({a} + {b}) - {d}^2.", f"Evaluate {c} * ({a} + {b}) - {d}^2 in the right order.")[half]
    return ask, (f"The bracket: {a} + {b} = {a + b}.\nThe power: {d}^2 = {d * d}.\nThe product: {c} * {a + b} = {c * (a + b)}.\n"
                 f"{c * (a + b)} - {d * d} = {value}.\nAnswer: {value}")


def average(half, r):
    v = [r.randint(3, 70) for _ in range(r.choice([4, 5, 7, 8]))]
    ordered = sorted(v)
    n, half_way = len(v), len(v) // 2
    median = Fraction(ordered[half_way] if n % 2 else ordered[half_way - 1] + ordered[half_way], 1 if n % 2 else 2)
    ask = (f"Find the average and the median of {', '.join(map(str, v))}.",
           f"The numbers are {', '.join(map(str, v))}. Compute their average and their median.")[half]
    return ask, (f"The sum is {' + '.join(map(str, v))} = {sum(v)}.\nThe average is {sum(v)} / {n} = {decimal(Fraction(sum(v), n))}.\n"
                 f"In order: {', '.join(map(str, ordered))}.\nThe median is {decimal(median, 1)}.\nAnswer: {decimal(Fraction(sum(v), n))} and {decimal(median, 1)}")


def savings(half, r):
    value, rate, years = Fraction(r.randint(2, 60) * 100), r.choice([2, 3, 4, 5, 6]), r.randint(2, 4)
    who = r.choice(PEOPLE[half])
    ask = (f"{who} saves {value} dollars at {rate} percent a year. What is the amount after {years} years?",
           f"A sum of {value} euros grows by {rate}% every year. How large is it after {years} years?")[half]
    rows = []
    for year in range(1, years + 1):
        rows.append(f"Year {year}: {decimal(value)} * {100 + rate} / 100 = {decimal(value * (100 + rate) / 100)}.")
        value = Fraction(decimal(value * (100 + rate) / 100))
    return ask, "\n".join(rows) + f"\nAnswer: {decimal(value)}"


def arithmetic_sequence(half, r):
    a, d, n = r.randint(-9, 20), r.randint(2, 11), r.randint(8, 40)
    last = a + (n - 1) * d
    ask = (f"The first term of an arithmetic sequence is {a} and the difference is {d}. Compute term {n} and the sum of {n} terms.",
           f"Add the first {n} terms of the sequence {a}, {a + d}, {a + 2 * d}, {a + 3 * d}, ...")[half]
    return ask, (f"Term {n} is {a} + {n - 1} * {d} = {last}.\nThe sum is {n} * ({a} + {last}) / 2 = {n} * {a + last} / 2 = {n * (a + last) // 2}.\n"
                 f"Answer: term {last}, sum {n * (a + last) // 2}")


def ages(half, r):
    one, two = PEOPLE[half][2:4] if r.randrange(2) else PEOPLE[half][7:9]
    k, x, t = r.randint(2, 5), r.randint(5, 22), r.randint(2, 15)
    ask = (f"{one} is {k} times as old as {two}. In {t} years they are {(k + 1) * x + 2 * t} years old together. How old is {two}?",
           f"{one} is {k * x} years old, {k} times as old as {two}. How old are they together in {t} years?")[half]
    if half == 0:
        return ask, (f"Let x be the age of {two}. Then {k}x + x + 2 * {t} = {(k + 1) * x + 2 * t}.\n{k + 1}x = {(k + 1) * x + 2 * t} - {2 * t} = {(k + 1) * x}.\n"
                     f"x = {(k + 1) * x} / {k + 1} = {x}.\nAnswer: {x}")
    return ask, (f"{two} is {k * x} / {k} = {x} years old.\nNow they are {k * x} + {x} = {k * x + x} together.\n"
                 f"In {t} years: {k * x + x} + 2 * {t} = {k * x + x + 2 * t}.\nAnswer: {k * x + x + 2 * t}")


KINDS = [
    percent_rise, packing, linear_both_sides, mixture, geometric_sequence, quadratic_formula, least_multiple,
    base_conversion, modular_power, triangle_area, prism_volume, hypotenuse, line_through_points, derivative_of_cubic,
    definite_integral, choose, dice, spread, matrix_product, mixed_fractions, inequality, long_sum, sum_of_fractions,
    elimination, euclid, prime_factors, long_product, brackets, average, savings, arithmetic_sequence, ages,
]


def worked_problems(half, rng):
    """Question and solution, without end; all kinds come once before one comes again."""
    while True:
        for kind in rng.sample(KINDS, len(KINDS)):
            yield kind(half, rng)
