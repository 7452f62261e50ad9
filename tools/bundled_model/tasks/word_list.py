"""The words of the word tasks.

COMMON words also occur in stories and facts, so each may be a single token; they are used only for training.
Nearly all RARE words occur in no other text, so they stay split into pieces; about a tenth are held out (`split.py`).
"""

COMMON = tuple(
    """
    cat dog owl tom mia luna rex rose house garden river tree moon star rain sun bird friend home kitchen door
    window table chair apple bread cake soup lamp night day morning story model token graph cache seed block
    scale text word letter number name color red blue green yellow happy sad small big old kind good warm cold
    road hill field boat ball box book song smile hand eye nose tail paw wing nest leaf flower seed stone
    """.split()
)

RARE = tuple(
    """
    acorn actor album alley amber angle ankle anvil apron arrow attic bacon badge bagel baker bamboo banjo barn
    basin basket beach beak beard beaver belt bench berry blanket blaze board bonnet boot bottle bow bowl brain
    branch brass brick bridge broom brush bubble bucket buckle buffalo bulb bundle bunny bus cabin cable cactus
    camel camera camp canal candle candy canoe canvas cape card carpet carrot cart castle cave cedar celery
    cello cement chalk chart cheek cheese cherry chess chest chin church cider circus clay cliff clock cloth
    cloud clover coach coal coast coat cobra cocoa coin comb comet copper coral cork corn couch cow crab cradle
    crane crate cream creek crow crown cup curtain daisy dance deck deer denim desert desk dice diver dock doll
    dolphin donkey dove dragon drain drawer drill drum duck dune dust eagle ear easel echo eel egg elbow elk
    elm engine envelope fabric falcon fan farm feather fence fern ferry fig finch finger fire fish flag flame
    flint flock flour flute foam fog foot fork fossil fox frame frog frost fruit funnel galaxy garlic gate
    gazelle giant ginger glacier glass globe glove glue goat gold goose grain granite grape grass gravel guitar
    gull hammer hamster harbor harp hat hawk hazel heart hedge helmet hen herb heron hive hoe honey hood hook
    horn horse hut ice igloo ink iris iron island ivory ivy jacket jaguar jam jar jelly jewel judge juice
    jungle kayak kettle kite kitten knee knife knot koala lace ladder lake lantern lava lawn lemon leopard
    lily lime linen lion lizard llama lobster locket log lotus lunch lynx magnet maple marble market marsh mask
    mast meadow medal melon metal milk mill mint mirror mitten mole monkey moss moth motor mouse mud mug mule
    museum mushroom mustard needle nickel noodle nut oak oar oat ocean octopus olive onion orange orchid otter
    oven oyster paddle paint palm panda paper parade parrot pasta peach pear pearl pebble pelican pencil pepper
    piano pickle pier pigeon pillow pilot pine pipe planet plant plate plum pocket pond pony poppy potato puma
    pumpkin puppet puzzle quail quartz queen quilt rabbit radio radish raft rail ranch raven reed ribbon rice
    ring robin robot rocket roof rope ruby rug sack saddle sail salad salmon salt sand satin saucer scarf
    school scooter seal shark sheep shelf shell ship shirt shoe shovel shrimp silk silver skate ski sled
    sleeve sloth snail snake snow soap sock sofa spade sparrow spider spinach spoon spruce squid squirrel
    stable stamp statue steam stool stork storm straw stream string sugar suit swan sweater swing sword syrup
    tape teapot tent thread throne thumb tiger timber toad toast toffee tomato torch towel tower train tray
    trout truck trumpet tulip tunnel turkey turnip turtle umbrella valley vase velvet vest village vine violin
    wagon wallet walnut walrus wasp wave wax weasel whale wheat wheel whistle willow wolf wood wool worm yarn
    yogurt zebra zipper
    """.split()
)
